"""Bodies of Anthropic's clients, checked and written as chat's fields; knows no events."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from headrace.core.errors import RequestError
from headrace.protocols.fields.kinds import (
    Flag,
    Integer,
    Object,
    String,
    check_object,
    items_of,
    nullable,
    required,
    shown,
    wrong_value,
)
from headrace.protocols.fields.tools import MAX_TOOLS

_NAME = String(1)


class ClientTools(msgspec.Struct, frozen=True):
    """The field `tools`, as chat takes it; those that Anthropic's servers run are refused."""

    def check(self, value: Any, path: str) -> list[dict[str, Any]]:
        return [_tool(*each) for each in items_of(value, path, 0, MAX_TOOLS)]

    def schema(self) -> dict[str, Any]:
        tool = {
            "type": "object",
            "properties": {
                "type": {"enum": ["custom", None]},
                "name": {"type": "string"},
                "description": nullable(String()),
                "input_schema": {"type": "object"},
            },
            "required": ["name", "input_schema"],
        }
        return {"type": "array", "items": tool, "maxItems": MAX_TOOLS}


def _tool(value: Any, path: str) -> dict[str, Any]:
    check_object(value, path)
    if value.get("type") not in (None, "custom"):
        message = f"{path} is of type {shown(value['type'])}; this server takes custom tools only."
        raise RequestError("unsupported_parameter", message, f"{path}.type")
    function = {"name": required(value, "name", path, _NAME)}
    if value.get("description") is not None:
        function["description"] = required(value, "description", path, String())
    function["parameters"] = required(value, "input_schema", path, Object())
    if value.get("strict") is not None:
        function["strict"] = required(value, "strict", path, Flag())
    return {"type": "function", "function": function}


_CHOICES: Mapping[str, str] = {"auto": "auto", "any": "required", "none": "none"}


class ToolUse(NamedTuple):
    """The wanted tool in the words of chat's tool_choice, and whether several calls may come."""

    wanted: str | dict[str, Any] = "auto"
    is_parallel: bool = True


class ToolUseChoice(msgspec.Struct, frozen=True):
    """auto, any, none or one tool by name."""

    def check(self, value: Any, path: str) -> ToolUse:
        check_object(value, path)
        kind = required(value, "type", path, String())
        only_one = value.get("disable_parallel_tool_use")
        if only_one is not None:
            Flag().check(only_one, f"{path}.disable_parallel_tool_use")
        if kind == "tool":
            name = required(value, "name", path, _NAME)
            return ToolUse({"type": "function", "function": {"name": name}}, not only_one)
        if kind not in _CHOICES:
            raise wrong_value(kind, f"{path}.type", f"tool or one of {', '.join(_CHOICES)}")
        return ToolUse(_CHOICES[kind], not only_one)

    def schema(self) -> dict[str, Any]:
        properties: dict[str, Any] = {
            "type": {"enum": [*_CHOICES, "tool"]},
            "disable_parallel_tool_use": nullable(Flag()),
        }
        return {"type": "object", "properties": properties, "required": ["type"]}


_THINKS: Mapping[str, bool] = {"enabled": True, "adaptive": True, "disabled": False}


class Thinking(msgspec.Struct, frozen=True):
    """Whether the model should think first. How long is its own choice: no budget is enforced."""

    def check(self, value: Any, path: str) -> bool:
        check_object(value, path)
        kind = required(value, "type", path, String())
        if kind not in _THINKS:
            raise wrong_value(kind, f"{path}.type", f"one of {', '.join(_THINKS)}")
        if value.get("budget_tokens") is not None:
            Integer(1).check(value["budget_tokens"], f"{path}.budget_tokens")
        return _THINKS[kind]

    def schema(self) -> dict[str, Any]:
        properties = {"type": {"enum": list(_THINKS)}, "budget_tokens": nullable(Integer(1))}
        return {"type": "object", "properties": properties, "required": ["type"]}


class OutputFormat(msgspec.Struct, frozen=True):
    """A JSON schema for the answer, as chat's response_format."""

    def check(self, value: Any, path: str) -> dict[str, Any]:
        check_object(value, path)
        kind = required(value, "type", path, String())
        if kind != "json_schema":
            raise wrong_value(kind, f"{path}.type", "json_schema")
        schema = required(value, "schema", path, Object())
        return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}

    def schema(self) -> dict[str, Any]:
        properties = {"type": {"const": "json_schema"}, "schema": {"type": "object"}}
        return {"type": "object", "properties": properties, "required": ["type", "schema"]}


class NotServed(msgspec.Struct, frozen=True):
    """A field that asks for what only Anthropic's servers do."""

    def check(self, value: Any, path: str) -> None:
        if value not in ("", [], {}):
            message = f"{path} is not supported here; leave it out."
            raise RequestError("unsupported_parameter", message, path)

    def schema(self) -> dict[str, Any]:
        return {"enum": ["", [], {}]}
