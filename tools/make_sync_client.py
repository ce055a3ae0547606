"""Writes client/client.py, the blocking client, from the asynchronous client.

python -m tools.make_sync_client
"""

import re
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "src" / "headrace" / "client"
WORDS = {
    r"The asynchronous client: (.*)\.": (
        r"The blocking client: \1.\n\nWritten from async_client.py by tools/make_sync_client.py.\n"
    ),
    r"    # The event loop closes.*\n    while .*\n.*\n": (
        "    # A thread that is reading ends its loop itself.\n"
        "    if updates.gi_running:\n        return\n"
    ),
    r"\bag_running\b": "gi_running",
    r"leaves its `async with` block": "leaves its loop or its `with` block",
    r"async for event in events:\n +yield event": "yield from events",
    r"\basync (def|with|for)\b": r"\1",
    r"\bawait ": "",
    r"import asyncio": "import time",
    r"asyncio\.sleep": "time.sleep",
    r"AsyncGenerator\[(\w+), None\]": r"Generator[\1, None, None]",
    r"import AsyncGenerator": "import Generator",
    r"AbstractAsyncContextManager": "AbstractContextManager",
    r"contextlib\.aclosing": "contextlib.closing",
    r"\bAsync(Client|Stream)\b": r"\1",
    r"\basync_direct_transport\b": "direct_transport",
    r"\basync_answers\b": "answers",
    r"\b__a(enter|exit|iter)__": r"__\1__",
    r"\ba(close|read|iter_bytes)\(": r"\1(",
}


def written() -> str:
    """Return the source of the blocking client."""
    source = (FOLDER / "async_client.py").read_text()
    for word, other in WORDS.items():
        source = re.sub(word, other, source)
    for command in (("check", "--fix", "--select", "I"), ("format",)):
        ruff = [
            sys.executable,
            "-m",
            "ruff",
            *command,
            "--quiet",
            "--stdin-filename",
            "client.py",
            "-",
        ]
        source = subprocess.run(
            ruff, input=source, capture_output=True, text=True, check=True
        ).stdout
    return source


if __name__ == "__main__":
    (FOLDER / "client.py").write_text(written())
