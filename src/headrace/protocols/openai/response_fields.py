"""Fields of /v1/responses whose shape is their own; tools are read into the shape of chat's."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from headrace.protocols.fields.client_tools import (
    CLIENT_TYPES,
    CUSTOM,
    NAME,
    OfferedTools,
    ReadTool,
    custom_tool,
    fixed_tool,
)
from headrace.protocols.fields.kinds import (
    Object,
    String,
    check_count,
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
    not_forced,
)
from headrace_common.errors import RequestError

_FUNCTION = ("name", "description", "parameters", "strict")
_FORMATS = ("text", "json_object", "json_schema")
_MAX_PAIRS = 16
TOOL_CARRIERS = ("additional_tools", "tool_search_output", "tool_search_call_output")
"""Items that bring tools along, which the model may call from then on."""


class FlatTools(msgspec.Struct, frozen=True):
    """The field `tools`. Types of tools that a provider runs itself are skipped.

    The model knows a tool in a namespace by both names.
    """

    def check(self, value: Any, path: str) -> OfferedTools:
        if type(value) is not list:
            raise wrong_type(value, path, "an array")
        for i, tool in enumerate(value):
            check_object(tool, f"{path}[{i}]")
            required(tool, "type", f"{path}[{i}]", String())
        found, skipped = _sorted_tools((tool, f"{path}[{i}]") for i, tool in enumerate(value))
        check_count(len(found), path, 0, MAX_TOOLS)
        return OfferedTools.of((_read(it) for it in found), skipped)

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
        kind = value.get("type")
        if kind in CLIENT_TYPES and kind != CUSTOM:
            return (kind,)
        if kind not in ("function", CUSTOM):
            raise not_forced(value, path, 'like {"type": "function", "name": "…"}')
        name: str = required(value, "name", path, String(1))
        return (flat_name(value.get("namespace"), name),)

    def schema(self) -> dict[str, Any]:
        return ToolChoice().schema()


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


class _PlacedTool(NamedTuple):
    """A tool that the client runs, with its namespace ("" if it has none)."""

    path: str
    tool: dict[str, Any]
    namespace: str = ""


def with_found(offered: OfferedTools, items: Iterable[tuple[Any, str]]) -> OfferedTools:
    """Return the tools with those that items bring along, as the result of a search does.

    A tool that cannot be offered is skipped: it must not end the conversation. `strict` is not
    enforced, since a schema may have what no grammar can enforce.
    """
    found, skipped = [*offered.found], [*offered.skipped]
    names = {tool["function"]["name"] for tool in offered}
    for item, path in items:
        tools = item.get("tools") if item["type"] in TOOL_CARRIERS else None
        for i, tool in enumerate(tools if type(tools) is list else ()):
            more, others = _found(tool, f"{path}.tools[{i}]")
            skipped += others
            for read in more:
                name = read.tool["function"]["name"]
                if name not in names and len(found) < MAX_TOOLS:
                    names.add(name)
                    found.append(read)
                elif name not in names:
                    skipped.append(read.path)
    return OfferedTools.of(found, skipped)


def _found(tool: Any, path: str) -> tuple[list[ReadTool], list[str]]:
    try:
        required(Object().check(tool, path), "type", path, String())
        placed, others = _sorted_tools([(tool, path)])
        return [_read_loosely(it) for it in placed], others
    except RequestError:
        return [], [path]


def _read_loosely(placed: _PlacedTool) -> ReadTool:
    read = _read(placed._replace(tool={**placed.tool, "strict": None}))
    left_out = (f"{placed.path}.strict",) if placed.tool.get("strict") else ()
    return read._replace(skipped=read.skipped + left_out)


def _sorted_tools(tools: Iterable[tuple[Any, str]]) -> tuple[list[_PlacedTool], list[str]]:
    """The tools that the client runs, those in namespaces too, and the paths of all others.

    A tool in a namespace whose whole name is longer than a name may be is passed over.
    """
    found, others = list[_PlacedTool](), list[str]()
    for tool, place in tools:
        if tool["type"] == "function" or tool["type"] in CLIENT_TYPES:
            found.append(_PlacedTool(place, tool))
        elif tool["type"] != "namespace":
            others.append(place)
        else:
            namespace: str = required(tool, "name", place, String(1))
            for inner, inner_path in items_of(tool.get("tools"), f"{place}.tools", 0, MAX_TOOLS):
                check_object(inner, inner_path)
                name = flat_name(namespace, required(inner, "name", inner_path, String(1)))
                is_taken = inner.get("type") in ("function", CUSTOM) and NAME.fullmatch(name)
                found += [_PlacedTool(inner_path, inner, namespace)] if is_taken else []
                others += [] if is_taken else [inner_path]
    return found, others


def _read(placed: _PlacedTool) -> ReadTool:
    """A tool in chat's shape; RequestError names this route's path."""
    path, tool, namespace = placed
    if tool["type"] in CLIENT_TYPES and tool["type"] != CUSTOM:
        return fixed_tool(tool["type"], path)
    if namespace:
        tool = tool | {"name": flat_name(namespace, tool["name"])}
    if tool["type"] == CUSTOM:
        return custom_tool(tool, path)._replace(namespace=namespace)
    function = {name: tool[name] for name in _FUNCTION if tool.get(name) is not None}
    nested = {"type": "function", "function": function}
    try:
        Tools().check([nested], path)
    except RequestError as error:
        wrong, right = f"{path}[0].function", path
        param = (error.param or path).replace(wrong, right)
        raise RequestError(error.code, error.message.replace(wrong, right), param) from None
    return ReadTool(nested, path, namespace=namespace)
