"""Checks the fields of Anthropic's request bodies, and converts them to chat's fields."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from headrace.protocols.anthropic.client_tools import typed_function
from headrace.protocols.anthropic.toolsets import members_of, toolset_of
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
    """Tools in chat's format, the tools' paths, and the tools that were left out.

    `toolsets` maps the name of each toolset member, as the model sees the name, to the toolset.
    """

    functions: list[dict[str, Any]] = []
    paths: list[str] = []
    toolsets: dict[str, str] = {}
    skipped: tuple[str, ...] = ()
    # Maps the names of the tools that were left out to the tools' types.
    skipped_types: dict[str, str] = {}


class ClientTools(msgspec.Struct, frozen=True):
    """Reads the field `tools`. Leaves out a tool if the tool has no schema and is not built in."""

    def check(self, value: Any, path: str) -> ReadTools:
        read = ReadTools([], [], {})
        skipped, skipped_types = list[str](), dict[str, str]()
        for tool, place in items_of(value, path, 0, MAX_TOOLS):
            functions = _functions(tool, place, read.toolsets)
            read.functions.extend({"type": "function", "function": it} for it in functions)
            read.paths.extend(f"{place}.function" for _ in functions)
            if not functions:
                skipped.append(place)
                if type(tool.get("name")) is str:
                    skipped_types[tool["name"]] = tool["type"]
        return read._replace(skipped=tuple(skipped), skipped_types=skipped_types)

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


def _functions(tool: Any, path: str, toolsets: dict[str, str]) -> list[dict[str, Any]]:
    """Return a tool as functions in chat's format: several for a toolset, none for an unknown type.

    Members of a toolset are added to `toolsets`.
    """
    check_object(tool, path)
    kind = tool.get("type")
    kind = "custom" if kind is None else String().check(kind, f"{path}.type")
    if toolset := toolset_of(kind):
        members = members_of(toolset, tool, path)
        toolsets.update((it["name"], toolset) for it in members)
        return members
    function = _function(kind, tool, path)
    return [function] if function else []


def _function(kind: str, tool: dict[str, Any], path: str) -> dict[str, Any] | None:
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
    """The choice of a tool in chat's format, and whether the model may call several tools."""

    wanted: str | dict[str, Any] = "auto"
    is_parallel: bool = True


class ToolUseChoice(msgspec.Struct, frozen=True):
    """Reads auto, any, none or one tool by name."""

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
    """Reads whether the model should reason before it answers; `budget_tokens` is not enforced."""

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
    """Reads a JSON Schema for the answer, as chat's response_format."""

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
    """Refuses a field that only Anthropic's servers support; accepts an empty value."""

    def check(self, value: Any, path: str) -> None:
        if value not in ("", [], {}):
            message = f"{path} is not supported here; leave it out."
            raise RequestError("unsupported_parameter", message, path)

    def schema(self) -> dict[str, Any]:
        return {"enum": ["", [], {}]}
