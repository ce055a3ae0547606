"""Fields of /v1/responses whose shape is their own; tools are read into the shape of chat's."""

from typing import Any

import msgspec

from headrace.core.errors import RequestError
from headrace.protocols.fields.kinds import (
    Object,
    String,
    check_object,
    missing,
    required,
    wrong_type,
    wrong_value,
)
from headrace.protocols.fields.structure import Wanted
from headrace.protocols.fields.tools import AllowedTools, Choice, ToolChoice, Tools

_FUNCTION = ("name", "description", "parameters", "strict")
_FORMATS = ("text", "json_object", "json_schema")
_MAX_PAIRS = 16


class FlatTools(msgspec.Struct, frozen=True):
    """The field `tools`. Types of tools that a provider runs itself are skipped."""

    def check(self, value: Any, path: str) -> tuple[dict[str, Any], ...]:
        if type(value) is not list:
            raise wrong_type(value, path, "an array")
        found: list[dict[str, Any]] = []
        for i, tool in enumerate(value):
            check_object(tool, f"{path}[{i}]")
            if tool.get("type") is None:
                raise missing(f"{path}[{i}].type")
            if is_function(tool):
                found.append(_nested(tool, f"{path}[{i}]"))
        return Tools().check(found, path)

    def schema(self) -> dict[str, Any]:
        properties = {
            "type": {"type": "string"},
            "name": {"type": "string"},
            "description": {"type": "string"},
            "parameters": {"type": "object"},
            "strict": {"type": ["boolean", "null"]},
        }
        tool = {"type": "object", "properties": properties, "required": ["type"]}
        return {"type": "array", "items": tool}


class FlatChoice(msgspec.Struct, frozen=True):
    """`none`, `auto`, `required`, or an object without nested ones, read as chat's is."""

    def check(self, value: Any, path: str) -> Choice:
        if type(value) is not dict:
            return ToolChoice().check(value, path)
        if value.get("type") == "allowed_tools":
            return AllowedTools.read(value, path, is_flat=True)
        if value.get("type") != "function":
            raise wrong_value(value, path, 'like {"type": "function", "name": "…"}')
        return (required(value, "name", path, String(1)),)

    def schema(self) -> dict[str, Any]:
        return ToolChoice().schema()

    @staticmethod
    def shown(choice: Choice) -> str | dict[str, Any]:
        if isinstance(choice, AllowedTools):
            tools = [FlatChoice.shown((name,)) for name in choice.names]
            return {"type": "allowed_tools", "mode": choice.mode, "tools": tools}
        return choice if isinstance(choice, str) else {"type": "function", "name": choice[0]}


class TextFormat(msgspec.Struct, frozen=True):
    """The field `text`: plain, any JSON object, or JSON by a schema."""

    def check(self, value: Any, path: str) -> dict[str, Any]:
        given = Object().check(value, path)
        if given.get("format") is None:
            return given
        kind = Object().check(given["format"], f"{path}.format").get("type")
        if kind is None:
            raise missing(f"{path}.format.type")
        if kind not in _FORMATS:
            raise wrong_value(kind, f"{path}.format.type", f"one of {', '.join(_FORMATS)}")
        if kind == "json_schema":
            if given["format"].get("schema") is None:
                raise missing(f"{path}.format.schema")
            Object().check(given["format"]["schema"], f"{path}.format.schema")
        return given

    def schema(self) -> dict[str, Any]:
        format = {"type": "object", "properties": {"type": {"enum": list(_FORMATS)}}}
        return {"type": "object", "properties": {"format": format}}


class Metadata(msgspec.Struct, frozen=True):
    """Up to 16 pairs of strings, given back as they came."""

    def check(self, value: Any, path: str) -> dict[str, str]:
        given = Object().check(value, path)
        if len(given) > _MAX_PAIRS:
            message = f"{path} has {len(given)} entries; it may have {_MAX_PAIRS}."
            raise RequestError("invalid_value", message, path)
        for key, text in given.items():
            String(most=64).check(key, f"a key of {path}")
            String(most=512).check(text, f"{path}.{key}")
        return given

    def schema(self) -> dict[str, Any]:
        values = {"type": "string", "maxLength": 512}
        return {"type": "object", "maxProperties": _MAX_PAIRS, "additionalProperties": values}


def wanted_of(text: dict[str, Any]) -> Wanted | None:
    """The form of answer that a checked field `text` asks for."""
    format = text.get("format") or {}
    if format.get("type") == "json_object":
        return Wanted("json", {"type": "object"}, "text.format")
    if format.get("type") == "json_schema":
        return Wanted("json", format["schema"], "text.format.schema")
    return None


def is_function(tool: Any) -> bool:
    return isinstance(tool, dict) and tool.get("type") == "function"


def flat_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as this route shows it, from chat's shape."""
    function = tool["function"]
    return {"type": "function"} | {name: function.get(name) for name in _FUNCTION}


def _nested(tool: dict[str, Any], path: str) -> dict[str, Any]:
    """A tool in chat's shape; RequestError names this route's path."""
    function = {name: tool[name] for name in _FUNCTION if tool.get(name) is not None}
    nested = {"type": "function", "function": function}
    try:
        Tools().check([nested], path)
    except RequestError as error:
        wrong, right = f"{path}[0].function", path
        param = (error.param or path).replace(wrong, right)
        raise RequestError(error.code, error.message.replace(wrong, right), param) from None
    return nested
