"""Tools that are not functions and that the client runs: shown to the model as functions."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from headrace.protocols.fields.kinds import String, check_object, required, wrong_value
from headrace.text.lark_pattern import lark_pattern
from headrace_common.errors import RequestError

NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")  # OpenAI takes 64 characters, Anthropic 128
CUSTOM = "custom"
_TEXTS = {"type": "array", "items": {"type": "string"}}
_MS = {"type": "integer", "minimum": 0}
_PATCH = {
    "type": {"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
    "path": {"type": "string"},
    "diff": {"type": "string"},
}
_LOCAL_SHELL = {
    "command": _TEXTS,
    "working_directory": {"type": "string"},
    "timeout_ms": _MS,
    "env": {"type": "object", "additionalProperties": {"type": "string"}},
    "user": {"type": "string"},
}
_SHELL = {"commands": _TEXTS, "timeout_ms": _MS, "max_output_length": _MS}
_FIXED: Mapping[str, tuple[str, dict[str, Any], list[str]]] = {
    "apply_patch": (
        "Create, update or delete one file. In `diff`, each line begins with '+' if it is added, "
        "with '-' if it is removed and with a space if it stays; a line of '@@' and the text of "
        "an earlier line says where the change belongs. A file that is deleted needs no `diff`.",
        _PATCH,
        ["type", "path"],
    ),
    "local_shell": (
        "Run one program on the user's machine. `command` is the program and its arguments.",
        _LOCAL_SHELL,
        ["command"],
    ),
    "shell": (
        "Run commands in a shell, and get the output and the exit code of each.",
        _SHELL,
        ["commands"],
    ),
}
CLIENT_TYPES = (CUSTOM, *_FIXED)


class ReadTool(NamedTuple):
    """A tool as the template will see it, and what is known of it beside that."""

    tool: dict[str, Any]
    path: str  # of the object with its name
    kind: str = "function"
    namespace: str = ""
    skipped: tuple[str, ...] = ()
    fault: RequestError | None = None  # raised if the tool is forced


class OfferedTools(tuple[dict[str, Any], ...]):
    """The tools as the template will see them, with what the answer needs to know of them."""

    found: tuple[ReadTool, ...] = ()
    skipped: tuple[str, ...] = ()

    @classmethod
    def of(cls, found: Iterable[ReadTool], skipped: Iterable[str]) -> "OfferedTools":
        found = tuple(found)
        tools = cls(it.tool for it in found)
        tools.found = found
        own = (path for it in found for path in it.skipped)
        tools.skipped = tuple(dict.fromkeys((*skipped, *own)))
        return tools

    @property
    def kinds(self) -> dict[str, str]:
        """The types of the tools that are no functions, by name."""
        return {_name(it): it.kind for it in self.found if it.kind != "function"}

    @property
    def namespaces(self) -> dict[str, str]:
        return {_name(it): it.namespace for it in self.found if it.namespace}

    def refuse_forced(self, choice: Any) -> None:
        """Raise RequestError if the one tool that must be called has a fault."""
        for it in self.found:
            if isinstance(choice, tuple) and choice[0] == _name(it) and it.fault:
                raise it.fault


def check_name(name: str, path: str) -> None:
    """Raise RequestError if a tool may not have this name."""
    if not NAME.fullmatch(name):
        raise wrong_value(name, path, "1 to 128 letters, digits, dashes or underscores")


def _name(read: ReadTool) -> str:
    return str(read.tool["function"]["name"])


def fixed_tool(kind: str, path: str) -> ReadTool:
    """Return a tool whose type determines its name and parameters."""
    description, properties, needed = _FIXED[kind]
    return ReadTool(_function(kind, description, properties, needed), path, kind)


def custom_tool(own: Any, path: str) -> ReadTool:
    """A tool that takes free text, as a function with one string; `own` has its name and format."""
    check_object(own, path)
    name: str = required(own, "name", path, String(1))
    check_name(name, f"{path}.name")
    description = own.get("description")
    description = "" if description is None else String().check(description, f"{path}.description")
    text, pattern, fault = _read_format(own.get("format"), f"{path}.format")
    schema = {"type": "string"} | ({"pattern": pattern} if pattern else {})
    shown = "\n\n".join(filter(None, (description, text)))
    is_left_out = text and not pattern
    return ReadTool(
        _function(name, shown, {"input": schema}, ["input"]),
        path,
        CUSTOM,
        skipped=(f"{path}.format",) if is_left_out or fault else (),
        fault=fault,
    )


def _read_format(given: Any, path: str) -> tuple[str, str, RequestError | None]:
    """Return the words for a format, the pattern that enforces it, and the fault of the format."""
    if given is None or (type(given) is dict and given.get("type", "text") == "text"):
        return "", "", None
    grammar = given.get("grammar", given) if type(given) is dict else given
    if type(grammar) is not dict or type(grammar.get("definition")) is not str:
        return "", "", wrong_value(given, path, "text, or a grammar with syntax and definition")
    syntax, definition = grammar.get("syntax"), grammar["definition"]
    if syntax not in ("regex", "lark"):
        return "", "", wrong_value(syntax, f"{path}.syntax", "lark or regex")
    what = "regular expression" if syntax == "regex" else "Lark grammar"
    text = f"The input must match this {what}:\n{definition}"
    why, pattern = _checked(syntax, definition)
    if not why:
        return text, pattern, None
    message = f"{path}.definition cannot be enforced: it {why}."
    return text, "", RequestError("invalid_value", message, f"{path}.definition")


def _checked(syntax: str, definition: str) -> tuple[str, str]:
    """Return why a grammar cannot be enforced, and the pattern that enforces it.

    Both are empty for a Lark grammar that no pattern can express: the model is only shown it.
    """
    from headrace_common.grammar import GrammarError, lark_fault, pattern_fault

    try:
        if syntax == "regex":
            pattern = _anchored(definition)
            return pattern_fault(pattern), pattern
        if fault := lark_fault(definition):
            return fault, ""
        pattern = lark_pattern(definition)
        return "", _anchored(pattern) if pattern and not pattern_fault(pattern) else ""
    except GrammarError as error:
        return str(error), ""


def _anchored(pattern: str) -> str:
    """Return the pattern, made to match a whole text: JSON Schema would find it anywhere."""
    inner = pattern.removeprefix("^")
    if inner.endswith("$") and not inner.endswith("\\$"):
        inner = inner[:-1]
    return f"^(?:{inner})$"


def _function(
    name: str, description: str, properties: dict[str, Any], needed: list[str]
) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": needed,
        "additionalProperties": False,
    }
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}
