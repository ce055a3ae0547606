"""The answers of a model that repairs a function, as a script: a pure function of the prompt.

The prompt is one of headrace-mini's template. The answer calls the tools in it; without tools, the
answer is a file listing, which is aider's format for unknown models. The model itself answers
prompts that do not name the file.
"""

import json
import re
from typing import Any

FILE = "calc.py"
WRONG = "return a - b"
RIGHT = "return a + b  # was: a - b"  # a second repair would show
BEFORE = f"def add(a, b):\n    {WRONG}\n"
AFTER = BEFORE.replace(WRONG, RIGHT)
LAST_WORDS = "Done: add returns the sum."

_READERS = ("Read", "read", "read_file")
_EDITORS = ("Edit", "edit")
_SHELLS = ("exec_command", "shell_command", "shell")
# pi's own system message also has a part <tools>, which is not JSON.
_TOOLS = re.compile(r"<tools>\n(\{.*?)</tools>", re.DOTALL)
_PATH = re.compile(rf"/[\w./-]+/{re.escape(FILE)}")


def answer(prompt: str) -> str | None:
    path = _PATH.search(prompt)
    if path is None:
        return None
    if found := _TOOLS.search(prompt):
        tools = [json.loads(line) for line in found[1].splitlines()]
        num_results = prompt.count("<tool_response>")
        return _step(num_results, {t["function"]["name"]: t["function"] for t in tools}, path[0])
    if "file listing" in prompt:
        return f"{LAST_WORDS}\n\n{FILE}\n```\n{AFTER}```"
    return None


def _step(num_results: int, tools: dict[str, dict[str, Any]], path: str) -> str:
    """Read the file, edit it, and say so."""
    if num_results > 1:
        return LAST_WORDS
    for name in (_READERS, _EDITORS)[num_results]:
        if name in tools:
            return _call(name, _arguments(tools[name]["parameters"], path))
    patch = (
        f"*** Begin Patch\n*** Update File: {path}\n@@\n-    {WRONG}\n+    {RIGHT}\n*** End Patch"
    )
    if num_results and "apply_patch" in tools:
        return _call("apply_patch", {"input": patch})
    shell = next(name for name in _SHELLS if name in tools)
    command = f"apply_patch <<'EOF'\n{patch}\nEOF" if num_results else f"cat {path}"
    key = next(key for key in ("cmd", "command") if key in tools[shell]["parameters"]["properties"])
    is_list = tools[shell]["parameters"]["properties"][key].get("type") == "array"
    return _call(shell, {key: ["bash", "-lc", command] if is_list else command})


def _arguments(schema: dict[str, Any], path: str) -> dict[str, Any]:
    """A value for each required field of the tool, by the field's name."""
    values: dict[str, Any] = {}
    for key in schema["required"]:
        if "path" in key.lower():
            values[key] = path
        elif key.lower().startswith(("old", "before")):
            values[key] = WRONG
        elif key.lower().startswith(("new", "after")):
            values[key] = RIGHT
        elif key == "edits":
            values[key] = [_arguments(schema["properties"][key]["items"], path)]
    return values


def _call(name: str, arguments: dict[str, Any]) -> str:
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call>"
