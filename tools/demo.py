"""Shows the promises kept so far, on a real server, in under a minute: `make demo`."""

import concurrent.futures
import contextlib
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx

COUNT = "Count from 1 to 60."
LONG_PROMPT = "Here is a list of words: " + "river mill water wheel stone grain " * 250
SAY = print


@contextlib.contextmanager
def server() -> Iterator[str]:
    """A server on a free port; yields its address."""
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace", "serve", "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if found := re.search(r"ready at (http://[\d.:]+\d)", line):
                SAY(line.rstrip())
                yield found[1]
                break
        else:
            sys.exit("The server did not start.")
    finally:
        process.terminate()
        SAY(f"The server stopped with exit code {process.wait(timeout=60)}.")


def stream(url: str, prompt: str, **fields: object) -> Iterator[str]:
    """The text of a streamed chat, piece by piece."""
    body = {"messages": [{"role": "user", "content": prompt}], "stream": True, "temperature": 0}
    with httpx.stream(
        "POST", f"{url}/v1/chat/completions", json=body | fields, timeout=60
    ) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    if text := choice["delta"].get("content"):
                        yield text


def one_chat(url: str) -> None:
    SAY("\nOne chat, streamed:")
    started = time.monotonic()
    for number, text in enumerate(stream(url, "Hello! Who are you?")):
        if number == 0:
            first_ms = (time.monotonic() - started) * 1000
        print(text, end="", flush=True)
    SAY(f"\n(first text after {first_ms:.0f} ms)")


def many_beside_a_long_prompt(url: str) -> None:
    SAY("\nEight chats at once, and a long prompt beside them:")
    alone = "".join(stream(url, COUNT))
    with concurrent.futures.ThreadPoolExecutor(9) as pool:
        chats = [pool.submit(lambda: "".join(stream(url, COUNT))) for _ in range(8)]
        long = pool.submit(lambda: "".join(stream(url, LONG_PROMPT, max_tokens=5)))
        same = sum(chat.result() == alone for chat in chats)
        long.result()
    SAY(f"{same} of 8 gave exactly the text of the chat alone; the long prompt was answered too.")
    assert same == 8


def one_cancelled(url: str) -> None:
    SAY("\nA client that leaves in mid-answer:")
    pieces = stream(url, "Count from 1 to 200.")
    text = "".join(next(pieces) for _ in range(10))
    pieces.close()
    SAY(f"it read {text!r} and left; ", end="")
    started = time.monotonic()
    "".join(stream(url, "Hello!", max_tokens=4))
    SAY(f"the next chat was served in {(time.monotonic() - started) * 1000:.0f} ms.")


def main() -> None:
    with server() as url:
        one_chat(url)
        many_beside_a_long_prompt(url)
        one_cancelled(url)


if __name__ == "__main__":
    main()
