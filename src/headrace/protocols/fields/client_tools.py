"""Defines tools that clients run and that are not functions; the model sees functions instead."""

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from headrace.protocols.fields.kinds import String, check_object, required, wrong_value
from headrace.text.lark_pattern import lark_pattern
from headrace_common.errors import RequestError

# OpenAI allows 64 characters in a name, Anthropic 128.
NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")
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
    """A tool as the chat template sees the tool, with other facts that the server needs."""

    tool: dict[str, Any]
    # The path of the object that contains the tool's name.
    path: str
    kind: str = "function"
    namespace: str = ""
    skipped: tuple[str, ...] = ()
    # The error that is raised if the client forces a call of this tool.
    fault: RequestError | None = None


class OfferedTools(tuple[dict[str, Any], ...]):
    """The tools as the chat template sees them, with other facts that the server needs."""

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
        """Return a dict from the names of tools to the tools' types; functions are left out."""
        return {_name(it): it.kind for it in self.found if it.kind != "function"}

    @property
    def namespaces(self) -> dict[str, str]:
        return {_name(it): it.namespace for it in self.found if it.namespace}

    def refuse_forced(self, choice: Any) -> None:
        """Raise RequestError if `choice` forces a call of a tool that has a fault."""
        for it in self.found:
            if isinstance(choice, tuple) and choice[0] == _name(it) and it.fault:
                raise it.fault


def check_name(name: str, path: str) -> None:
    """Raise RequestError if the name is not allowed for a tool."""
    if not NAME.fullmatch(name):
        raise wrong_value(name, path, "1 to 128 letters, digits, dashes or underscores")


def _name(read: ReadTool) -> str:
    return str(read.tool["function"]["name"])


def fixed_tool(kind: str, path: str) -> ReadTool:
    """Return a tool whose type determines its name and parameters."""
    description, properties, needed = _FIXED[kind]
    return ReadTool(_function(kind, description, properties, needed), path, kind)


def custom_tool(own: Any, path: str) -> ReadTool:
    """Return a free-text tool as a function with one string.

    `own` has the tool's name and format.
    """
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


def _read_format(value: Any, path: str) -> tuple[str, str, RequestError | None]:
    """Return a format as text for the model and as a pattern, and the error if there is one."""
    if value is None or (type(value) is dict and value.get("type", "text") == "text"):
        return "", "", None
    grammar = value.get("grammar", value) if type(value) is dict else value
    if type(grammar) is not dict or type(grammar.get("definition")) is not str:
        return "", "", wrong_value(value, path, "text, or a grammar with syntax and definition")
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
    """Return the reason why a grammar cannot be enforced, and a pattern that enforces the grammar.

    Both texts are empty for a valid Lark grammar that no pattern can express. The model sees such
    a grammar as text, but nothing enforces the grammar.
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
    """Return a pattern that matches only a whole text; JSON Schema's patterns match anywhere."""
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
