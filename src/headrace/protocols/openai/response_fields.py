"""Fields of /v1/responses whose shape is their own; tools are read into the shape of chat's."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from headrace.core.errors import RequestError
from headrace.protocols.fields.kinds import (
    Object,
    String,
    check_object,
    items_of,
    missing,
    required,
    wrong_type,
    wrong_value,
)
from headrace.protocols.fields.structure import Wanted
from headrace.protocols.fields.tools import (
    MAX_TOOLS,
    AllowedTools,
    Choice,
    ToolChoice,
    Tools,
    flat_name,
    is_name,
)

_FUNCTION = ("name", "description", "parameters", "strict")
_FORMATS = ("text", "json_object", "json_schema")
_MAX_PAIRS = 16


class FlatTools(msgspec.Struct, frozen=True):
    """The field `tools`. Types of tools that a provider runs itself are skipped.

    The model knows a function in a namespace by both names.
    """

    def check(self, value: Any, path: str) -> tuple[dict[str, Any], ...]:
        if type(value) is not list:
            raise wrong_type(value, path, "an array")
        for i, tool in enumerate(value):
            check_object(tool, f"{path}[{i}]")
            if tool.get("type") is None:
                raise missing(f"{path}[{i}].type")
        functions, _ = sorted_tools(value, path)
        return Tools().check([_nested(it.renamed, it.path) for it in functions], path)

    def schema(self) -> dict[str, Any]:
        properties = {
            "type": {"type": "string"},
            "name": {"type": "string"},
            "description": {"type": "string"},
            "parameters": {"type": "object"},
            "strict": {"type": ["boolean", "null"]},
            "tools": {"type": "array", "items": {"type": "object"}},
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
        name: str = required(value, "name", path, String(1))
        return (flat_name(value.get("namespace"), name),)

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


class PlacedFunction(NamedTuple):
    """A function among the tools of a body, and the namespace that it stands in, or ""."""

    path: str
    tool: dict[str, Any]
    namespace: str = ""

    @property
    def renamed(self) -> dict[str, Any]:
        """The tool by the name that the model knows it by."""
        if not self.namespace:
            return self.tool
        return self.tool | {"name": flat_name(self.namespace, self.tool["name"])}


def sorted_tools(
    tools: Iterable[Any], path: str = "tools"
) -> tuple[list[PlacedFunction], list[str]]:
    """The functions, those in namespaces too, and the paths of all that is passed over.

    A function in a namespace whose whole name is longer than a name may be is passed over.
    """
    functions, others = list[PlacedFunction](), list[str]()
    for i, tool in enumerate(tools):
        place = f"{path}[{i}]"
        if tool["type"] == "function":
            functions.append(PlacedFunction(place, tool))
        elif tool["type"] != "namespace":
            others.append(place)
        else:
            namespace: str = required(tool, "name", place, String(1))
            for inner, inner_path in items_of(tool.get("tools"), f"{place}.tools", 0, MAX_TOOLS):
                check_object(inner, inner_path)
                found = PlacedFunction(inner_path, inner, namespace)
                is_taken = inner.get("type") == "function" and is_name(
                    flat_name(namespace, required(inner, "name", inner_path, String(1)))
                )
                functions += [found] if is_taken else []
                others += [] if is_taken else [inner_path]
    return functions, others


def shown_tools(functions: list[PlacedFunction]) -> list[dict[str, Any]]:
    """The tools as this route shows them, those in a namespace together."""
    shown: list[dict[str, Any]] = []
    for found in functions:
        tool = {"type": "function"} | {name: found.tool.get(name) for name in _FUNCTION}
        if not found.namespace:
            shown.append(tool)
        elif shown and shown[-1].get("name") == found.namespace and "tools" in shown[-1]:
            shown[-1]["tools"].append(tool)
        else:
            shown.append({"type": "namespace", "name": found.namespace, "tools": [tool]})
    return shown


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
