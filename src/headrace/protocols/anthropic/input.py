"""Bodies of Anthropic's clients, checked and written as chat's fields; knows no events."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from headrace.protocols.anthropic.client_tools import typed_function
from headrace.protocols.fields.client_tools import check_name
from headrace.protocols.fields.kinds import (
    Flag,
    Integer,
    Object,
    String,
    check_object,
    items_of,
    nullable,
    required,
    wrong_value,
)
from headrace.protocols.fields.tools import MAX_TOOLS
from headrace_common.errors import RequestError

_NAME = String(1)


class ReadTools(NamedTuple):
    """Tools as chat takes them, with their paths; and the paths and names of those left out."""

    functions: list[dict[str, Any]] = []
    paths: list[str] = []
    skipped: tuple[str, ...] = ()
    skipped_names: tuple[str, ...] = ()


class ClientTools(msgspec.Struct, frozen=True):
    """The field `tools`; those that Anthropic's servers would run are left out."""

    def check(self, value: Any, path: str) -> ReadTools:
        given = items_of(value, path, 0, MAX_TOOLS)
        found = [(tool, place, _function(tool, place)) for tool, place in given]
        others = [(tool, place) for tool, place, function in found if function is None]
        return ReadTools(
            [{"type": "function", "function": function} for *_, function in found if function],
            [f"{place}.function" for _, place, function in found if function],
            tuple(place for _, place in others),
            tuple(str(tool.get("name")) for tool, _ in others),
        )

    def schema(self) -> dict[str, Any]:
        tool = {
            "type": "object",
            "properties": {
                "type": nullable(String()),
                "name": {"type": "string"},
                "description": nullable(String()),
                "input_schema": {"type": "object"},
            },
        }
        return {"type": "array", "items": tool, "maxItems": MAX_TOOLS}


def _function(tool: Any, path: str) -> dict[str, Any] | None:
    """The function that chat knows the tool as; None if the client does not run it."""
    check_object(tool, path)
    kind = tool.get("type")
    kind = "custom" if kind is None else String().check(kind, f"{path}.type")
    if kind == "custom" or tool.get("input_schema") is not None:
        function = {"name": required(tool, "name", path, _NAME)}
        if tool.get("description") is not None:
            function["description"] = required(tool, "description", path, String())
        function["parameters"] = required(tool, "input_schema", path, Object())
    elif typed := typed_function(kind, tool, path):
        function = typed
        if tool.get("name") is not None:
            function["name"] = required(tool, "name", path, _NAME)
    else:
        return None
    check_name(function["name"], f"{path}.name")
    if tool.get("strict") is not None:
        function["strict"] = required(tool, "strict", path, Flag())
    return function


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


_THINKS: Mapping[str, bool] = {
    "enabled": True,
    "adaptive": True,
    "between_tools": True,
    "disabled": False,
}


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
