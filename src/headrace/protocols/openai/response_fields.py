"""Reads the fields of /v1/responses that differ from chat's; converts tools to chat's tools."""

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
    Integer,
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
from headrace.protocols.fields.structure import AnswerConstraint
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
_TRUNCATIONS = ("auto", "disabled")
_MAX_PAIRS = 16
TOOL_CARRIERS = ("additional_tools", "tool_search_output", "tool_search_call_output")
"""Types of items that contain tools. The model may call these tools after the item."""


class FlatTools(msgspec.Struct, frozen=True):
    """Reads the field `tools`; skips tools that a provider runs itself.

    The model knows a tool in a namespace by the namespace and the name, joined.
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
    """Reads a `tool_choice` with flat objects, and returns the same values as ToolChoice."""

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
    """Reads the field `text`: plain text, any JSON object, or JSON that matches a schema."""

    def check(self, value: Any, path: str) -> dict[str, Any]:
        text = Object().check(value, path)
        if text.get("format") is None:
            return text
        kind = Object().check(text["format"], f"{path}.format").get("type")
        if kind is None:
            raise missing(f"{path}.format.type")
        if kind not in _FORMATS:
            raise wrong_value(kind, f"{path}.format.type", f"one of {', '.join(_FORMATS)}")
        if kind == "json_schema":
            if text["format"].get("schema") is None:
                raise missing(f"{path}.format.schema")
            Object().check(text["format"]["schema"], f"{path}.format.schema")
        return text

    def schema(self) -> dict[str, Any]:
        format = {"type": "object", "properties": {"type": {"enum": list(_FORMATS)}}}
        return {"type": "object", "properties": {"format": format}}


class Truncation(msgspec.Struct, frozen=True):
    """Reads the field `truncation`: whether items may be dropped from a long conversation."""

    def check(self, value: Any, path: str) -> str:
        if value not in _TRUNCATIONS:
            raise wrong_value(value, path, f"one of {', '.join(_TRUNCATIONS)}")
        return str(value)

    def schema(self) -> dict[str, Any]:
        return {"enum": list(_TRUNCATIONS)}


class ContextManagement(msgspec.Struct, frozen=True):
    """Reads the field `context_management` as the number of tokens at which to compact.

    Returns None without an entry, and 0 for an entry without a threshold.
    """

    def check(self, value: Any, path: str) -> int | None:
        threshold = None
        for entry, place in items_of(value, path, 0, 1):
            check_object(entry, place)
            kind: str = required(entry, "type", place, String())
            if kind != "compaction":
                raise wrong_value(kind, f"{place}.type", "compaction")
            asked = entry.get("compact_threshold")
            place = f"{place}.compact_threshold"
            threshold = 0 if asked is None else Integer(1, 1 << 30).check(asked, place)
        return threshold

    def schema(self) -> dict[str, Any]:
        threshold = {"anyOf": [Integer(1, 1 << 30).schema(), {"type": "null"}]}
        properties = {"type": {"enum": ["compaction"]}, "compact_threshold": threshold}
        entry = {"type": "object", "properties": properties, "required": ["type"]}
        return {"type": "array", "items": entry, "maxItems": 1}


class Metadata(msgspec.Struct, frozen=True):
    """Reads up to 16 pairs of strings, which the response repeats unchanged."""

    def check(self, value: Any, path: str) -> dict[str, str]:
        pairs = Object().check(value, path)
        if len(pairs) > _MAX_PAIRS:
            message = f"{path} has {len(pairs)} entries; it may have {_MAX_PAIRS}."
            raise RequestError("invalid_value", message, path)
        for key, text in pairs.items():
            String(most=64).check(key, f"a key of {path}")
            String(most=512).check(text, f"{path}.{key}")
        return pairs

    def schema(self) -> dict[str, Any]:
        values = {"type": "string", "maxLength": 512}
        return {"type": "object", "maxProperties": _MAX_PAIRS, "additionalProperties": values}


class ConversationId(msgspec.Struct, frozen=True):
    """Reads a conversation's id, or an object with the id."""

    def check(self, value: Any, path: str) -> str:
        if type(value) is dict:
            id: str = required(value, "id", path, String(1, 128))
            return id
        return String(1, 128).check(value, path)

    def schema(self) -> dict[str, Any]:
        id = String(1, 128).schema()
        return {"anyOf": [id, {"type": "object", "properties": {"id": id}, "required": ["id"]}]}


def constraint_of(text: dict[str, Any]) -> AnswerConstraint | None:
    """Return the constraint that a checked field `text` asks for."""
    format = text.get("format") or {}
    if format.get("type") == "json_object":
        return AnswerConstraint("json", {"type": "object"}, "text.format")
    if format.get("type") == "json_schema":
        is_strict = format.get("strict") is not False
        return AnswerConstraint("json", format["schema"], "text.format.schema", is_strict)
    return None


class _PlacedTool(NamedTuple):
    """A tool that the client runs, and the tool's namespace ("" for a tool without a namespace)."""

    path: str
    tool: dict[str, Any]
    namespace: str = ""


def with_found(offered: OfferedTools, items: Iterable[tuple[Any, str]]) -> OfferedTools:
    """Return the offered tools and the tools in `items`, such as the results of a tool search.

    A tool that cannot be offered is skipped, so that the conversation can continue. `strict` is
    ignored for tools in items, because their schemas may contain what a grammar cannot enforce.
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
    """Return the tools that the client runs, and the paths of all other tools.

    Tools in namespaces are included. A tool in a namespace is skipped if its namespace and name,
    joined, are not a valid name.
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
    """Return a tool in chat's format. Raise RequestError with this route's paths."""
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
