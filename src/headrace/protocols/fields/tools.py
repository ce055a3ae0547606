"""Reads tools as OpenAI's routes accept them, and the arguments of tool calls."""

from collections.abc import Iterable
from typing import Any

import msgspec

from headrace.protocols.fields.client_tools import (
    CLIENT_TYPES,
    CUSTOM,
    NAME,
    OfferedTools,
    ReadTool,
    check_name,
    custom_tool,
)
from headrace.protocols.fields.kinds import (
    Object,
    String,
    check_object,
    items_of,
    missing,
    required,
    shown,
    wrong_type,
    wrong_value,
)
from headrace.text.parameter_types import parameter_types
from headrace_common.errors import RequestError

MAX_TOOLS = 128


class Tools(msgspec.Struct, frozen=True):
    """Reads the field `tools` as OfferedTools; skips tools of types that a provider runs itself."""

    def check(self, value: Any, path: str) -> OfferedTools:
        found, skipped = list[ReadTool](), list[str]()
        for tool, place in items_of(value, path, 0, MAX_TOOLS):
            kind = _type_of(tool, place)
            if kind == CUSTOM:
                found.append(custom_tool(tool.get(CUSTOM), f"{place}.{CUSTOM}"))
            elif kind == "function":
                found.append(ReadTool(_tool(tool, place), f"{place}.function"))
            else:
                skipped.append(place)
        return OfferedTools.of(found, skipped)

    def schema(self) -> dict[str, Any]:
        function = {
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": f"^{NAME.pattern}$"},
                "description": {"type": "string"},
                "parameters": {"type": "object"},
                "strict": {"type": ["boolean", "null"]},
            },
            "required": ["name"],
        }
        tool = {
            "type": "object",
            "properties": {"type": {"type": "string"}, "function": function},
            "required": ["type"],
        }
        return {"type": "array", "items": tool, "maxItems": MAX_TOOLS}


class AllowedTools(msgspec.Struct, frozen=True):
    """The names of the tools that may be called, and the mode `auto` or `required`."""

    mode: str
    names: tuple[str, ...]
    # The path of the list of allowed tools.
    path: str

    @classmethod
    def read(cls, choice: dict[str, Any], path: str, is_flat: bool) -> "AllowedTools":
        """Read the choice. If `is_flat`, the name and the type of a tool are in the same object.

        If not, the name is in a nested object `function` or `custom`.
        """
        mode = required(choice, "mode", path, String())
        if mode not in ("auto", "required"):
            raise wrong_value(mode, f"{path}.mode", "auto or required")
        found = items_of(choice.get("tools"), f"{path}.tools", 1, MAX_TOOLS)
        names = filter(None, (_allowed_name(*each, is_flat) for each in found))
        return cls(mode, tuple(names), f"{path}.tools")


def _allowed_name(value: Any, path: str, is_flat: bool) -> str:
    """Return the name of a tool that may be called; empty for a tool that a provider runs."""
    tool = Object().check(value, path)
    kind = required(tool, "type", path, String())
    if kind not in ("function", CUSTOM):
        return kind if kind in CLIENT_TYPES else ""
    if not is_flat:
        path += f".{kind}"
        tool = Object().check(tool.get(kind), path)
    name: str = required(tool, "name", path, String(1))
    return flat_name(tool.get("namespace"), name) if is_flat else name


_OTHER_WORDS = ("none", "auto", "required", "any", "tool")
"""Values of `type` in the tool choices of other APIs. No tool has a type with such a name."""

Choice = str | tuple[str] | AllowedTools
"""`none`, `auto`, `required`, one function by name, or several allowed tools."""


class ToolChoice(msgspec.Struct, frozen=True):
    """Reads `none`, `auto`, `required`, one function by name, or the allowed tools."""

    def check(self, value: Any, path: str) -> Choice:
        if type(value) is str:
            if value not in ("none", "auto", "required"):
                raise wrong_value(value, path, "none, auto, required or a function")
            return value
        if type(value) is not dict:
            raise wrong_type(value, path, "a string or an object")
        if value.get("type") == "allowed_tools":
            allowed = Object().check(value.get("allowed_tools"), f"{path}.allowed_tools")
            return AllowedTools.read(allowed, f"{path}.allowed_tools", is_flat=False)
        kind = value.get("type")
        function = value.get(kind) or {} if kind in ("function", CUSTOM) else None
        if type(function) is not dict:
            example = 'like {"type": "function", "function": {"name": "…"}}'
            raise not_forced(value, path, example)
        return (required(function, "name", f"{path}.{kind}", String(1)),)

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object"}]}


def not_forced(choice: dict[str, Any], path: str, example: str) -> RequestError:
    """Return the error for a forced tool that this server lacks; `example` shows a valid choice."""
    kind = choice.get("type")
    if type(kind) is not str or kind in ("function", CUSTOM, *_OTHER_WORDS):
        return wrong_value(choice, path, example)
    message = f"{path} asks for a tool of type {shown(kind)}, which this server cannot offer to "
    message += "the model. Send a function that does the same, or send tool_choice auto."
    return RequestError("unsupported_parameter", message, f"{path}.type")


def flat_name(namespace: str | None, name: str) -> str:
    """Return the name by which a model knows a function in a namespace."""
    return f"{namespace}__{name}" if namespace else name


def narrow(fields: dict[str, Any]) -> None:
    """Remove the tools that `tool_choice` does not allow; replace the choice with its mode."""
    choice, tools = fields.get("tool_choice"), fields.get("tools", ())
    if not isinstance(choice, AllowedTools):
        return
    known = [tool["function"]["name"] for tool in tools]
    for i, name in enumerate(choice.names):
        if name not in known:
            sent = f"one of {', '.join(known[:10])}" if known else "a tool, but no tools were sent"
            raise wrong_value(name, f"{choice.path}[{i}]", sent)
    allowed = [i for i, name in enumerate(known) if name in choice.names]
    fields["tools"] = tuple(tools[i] for i in allowed)
    fields["tool_choice"] = choice.mode
    if paths := fields.get("tool_paths"):
        fields["tool_paths"] = [paths[i] for i in allowed]


def check_choice(fields: dict[str, Any], path: str = "tool_choice.function.name") -> None:
    """Raise RequestError if a forced tool is missing, or if two tools have the same name.

    `path` is the path of the forced tool's name.
    """
    choice, tools = fields.get("tool_choice", "auto"), fields.get("tools", ())
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        message = f"Two tools are named {twice}; names must differ."
        raise RequestError("invalid_value", message, "tools")
    if choice == "required" and not tools:
        message = (
            'tool_choice is "required", but no tools were sent. Send tools, or tool_choice auto.'
        )
        raise RequestError("invalid_value", message, "tool_choice")
    if isinstance(choice, tuple) and choice[0] not in names:
        known = f"one of {', '.join(names[:10])}" if names else "a tool, but no tools were sent"
        raise wrong_value(choice[0], path, known)


def types_of(tools: Iterable[dict[str, Any]]) -> dict[str, dict[str, tuple[str, ...]]]:
    """Return a dict from each tool's name to the types of the parameters that can be strings."""
    functions = (tool["function"] for tool in tools)
    return {it["name"]: parameter_types(it.get("parameters")) for it in functions}


def _type_of(tool: Any, path: str) -> str:
    if type(tool) is not dict:
        raise wrong_type(tool, path, "an object")
    return str(required(tool, "type", path, String()))


def _tool(value: dict[str, Any], path: str) -> dict[str, Any]:
    if value.get("function") is None:
        raise missing(f"{path}.function")
    function = Object().check(value["function"], f"{path}.function")
    name = required(function, "name", f"{path}.function", String())
    check_name(name, f"{path}.function.name")
    if function.get("description") is not None:
        String().check(function["description"], f"{path}.function.description")
    if function.get("parameters") is not None:
        check_object(function["parameters"], f"{path}.function.parameters")
    if type(function.get("strict")) not in (bool, type(None)):
        raise wrong_type(function["strict"], f"{path}.function.strict", "true or false")
    return value


def arguments_of(text: str) -> dict[str, Any]:
    """Return a call's arguments; empty if the text is incomplete or JSON cannot represent them."""
    try:
        value = msgspec.json.decode(text)
        msgspec.json.encode(value)
    except (ValueError, RecursionError, OverflowError):
        return {}
    return value if isinstance(value, dict) else {}
