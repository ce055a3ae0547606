"""The structure that a body asks of its answer: one constraint, and calls of its tools.

Knows no model: `grammars.py` makes a grammar of it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from headrace.protocols.fields.kinds import (
    Kind,
    String,
    check_object,
    items_of,
    missing,
    wrong_value,
)
from headrace.text.json_schema import exact_number
from headrace_common.errors import RequestError

MAX_CHOICES = 1024
_decode_exactly = msgspec.json.Decoder(float_hook=exact_number).decode
_MAX_CALLS = 8
_MAX_DEPTH = 64


class JsonSchema(msgspec.Struct, frozen=True):
    """A JSON Schema, as an object or as its text."""

    def check(self, value: Any, path: str) -> dict[str, Any]:
        if type(value) is not str or not value:
            check_object({} if value == "" else value, path)
            return value or {}
        try:
            decoded = _decode_exactly(value)
        except (ValueError, RecursionError):
            raise wrong_value(value, path, "a JSON Schema, as an object or as text") from None
        check_object(decoded, path)
        if _is_deep(decoded):
            message = f"{path} is nested deeper than {_MAX_DEPTH} levels."
            raise RequestError("invalid_value", message, path)
        schema: dict[str, Any] = decoded
        return schema

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [{"type": "object"}, {"type": "string"}]}


class AnswerChoices(msgspec.Struct, frozen=True):
    """The only answers there are."""

    def check(self, value: Any, path: str) -> tuple[str, ...]:
        found = items_of(value, path, 0, MAX_CHOICES, "an array of strings")
        return tuple(String(1).check(*each) for each in found)

    def schema(self) -> dict[str, Any]:
        return {"type": "array", "items": {"type": "string", "minLength": 1}}


class ResponseFormat(msgspec.Struct, frozen=True):
    """Text, any JSON object, or JSON by a schema; read as a Wanted, or None for text."""

    def check(self, value: Any, path: str) -> "Wanted | None":
        check_object(value, path)
        if not value or value.get("type") == "text":
            return None
        if value.get("type") is None:
            raise missing(f"{path}.type")
        if value["type"] == "json_object":
            return _object_of(value, path)
        if value["type"] != "json_schema":
            raise wrong_value(value["type"], f"{path}.type", "text, json_object or json_schema")
        path = f"{path}.json_schema"
        described = value.get("json_schema")
        if described is None:
            raise missing(path)
        check_object(described, path)
        if described.get("schema") is None:
            raise missing(f"{path}.schema")
        check_object(described["schema"], f"{path}.schema")
        is_strict = described.get("strict") is not False
        return Wanted("json", described["schema"], f"{path}.schema", is_strict)

    def schema(self) -> dict[str, Any]:
        properties: dict[str, Any] = {"type": {"enum": ["text", "json_object", "json_schema"]}}
        properties |= {"json_schema": {"type": "object"}, "schema": {"type": "object"}}
        return {"type": "object", "properties": properties}


def _object_of(value: dict[str, Any], path: str) -> "Wanted":
    """Return a constraint to any JSON object, or to one that follows llama.cpp's field `schema`."""
    if value.get("schema") is None:
        return Wanted("json", _ANY_OBJECT, path)
    check_object(value["schema"], f"{path}.schema")
    return Wanted("json", value["schema"], f"{path}.schema")


class Wanted(NamedTuple):
    """One constraint: how `value`, which stood at `path`, is to be read."""

    syntax: str  # json, regex, choice, grammar
    value: Any
    path: str
    is_strict: bool = True  # what cannot be enforced is refused, not left out


_ANY_OBJECT: dict[str, Any] = {"type": "object"}
_SOURCES: Mapping[str, tuple[str, Kind]] = {
    "guided_json": ("json", JsonSchema()),
    "guided_regex": ("regex", String()),
    "guided_choice": ("choice", AnswerChoices()),
    "guided_grammar": ("grammar", String()),
    "json_schema": ("json", JsonSchema()),
    "grammar": ("grammar", String()),
}
_OPTIONS: Mapping[str, tuple[str, Kind]] = {
    "json": ("json", JsonSchema()),
    "regex": ("regex", String()),
    "choice": ("choice", AnswerChoices()),
    "grammar": ("grammar", String()),
}


class StructuredOutputs(msgspec.Struct, frozen=True):
    """vLLM's object with one of json, regex, choice, grammar, json_object; read as Wanteds."""

    def check(self, value: Any, path: str) -> "tuple[Wanted, ...]":
        check_object(value, path)
        found = []
        for name, item in value.items():
            if name == "json_object" and item is True:
                found.append(Wanted("json", _ANY_OBJECT, f"{path}.json_object"))
            elif name in _OPTIONS and item is not None:
                syntax, kind = _OPTIONS[name]
                found.append(Wanted(syntax, kind.check(item, f"{path}.{name}"), f"{path}.{name}"))
            elif item not in (None, False, "", [], {}):
                known = ", ".join((*_OPTIONS, "json_object"))
                message = f"{path}.{name} is not supported here; there is {known}."
                raise RequestError("unsupported_parameter", message, f"{path}.{name}")
        return tuple(found)

    def schema(self) -> dict[str, Any]:
        properties = {name: kind.schema() for name, (_, kind) in _OPTIONS.items()}
        return {"type": "object", "properties": {**properties, "json_object": {"type": "boolean"}}}


FIELDS: Mapping[str, Kind] = {
    "response_format": ResponseFormat(),
    "structured_outputs": StructuredOutputs(),
    **{name: kind for name, (_, kind) in _SOURCES.items()},
}
"""Rows of a route's table; `take` reads what they gave."""


class Tool(NamedTuple):
    """A tool that may be called; `path` is that of its schema."""

    name: str
    schema: dict[str, Any]
    path: str
    is_strict: bool


class CallsWanted(NamedTuple):
    """Calls in the form that the tools give them; forced ones are the whole answer."""

    tools: tuple[Tool, ...]
    is_forced: bool
    most: int
    path: str  # of what asked for it


class Structure(NamedTuple):
    """The form that a body asks its answer to have; at least one of both."""

    wanted: Wanted | None
    calls: CallsWanted | None
    may_reason: bool  # first, if the model does
    is_message: bool  # a whole one of a chat, with what a model writes before its text

    @property
    def path(self) -> str:
        asked = self.wanted or self.calls
        assert asked
        return asked.path


def take(fields: dict[str, Any], exact: Mapping[int, Any] | None = None) -> Structure | None:
    """Takes the fields above out of a body's, with what its tools ask for; None: nothing.

    `exact` has schemas with all digits of their numbers, by the id of the object that was read.
    RequestError for two constraints, which would exclude each other.
    """
    one_call, paths = fields.pop("one_call", False), fields.pop("tool_paths", ())
    taken = {name: fields.pop(name) for name in FIELDS if name in fields}
    found = list(_found(taken))
    if len(found) > 1:
        message = f"{found[0].path} and {found[1].path} exclude each other; send one."
        raise RequestError("invalid_value", message, found[1].path)
    exact = exact or {}
    wanted = None
    if found:
        wanted = found[0]._replace(value=exact.get(id(found[0].value), found[0].value))
    calls = _calls(fields, wanted, 1 if one_call else _MAX_CALLS, paths)
    if wanted and calls and calls.is_forced:
        message = f"tool_choice forces a tool call, and {wanted.path} another answer; send one."
        raise RequestError("invalid_value", message, wanted.path)
    if calls:
        tools = (it._replace(schema=exact.get(id(it.schema), it.schema)) for it in calls.tools)
        calls = calls._replace(tools=tuple(tools))
    if not (wanted or calls):
        return None
    is_chat = bool(fields.keys() & {"messages", "input"})
    is_message = is_chat and not fields.get("continue_final_message")
    return Structure(wanted, calls, is_chat and not _is_reasoning_off(fields), is_message)


def _is_reasoning_off(fields: dict[str, Any]) -> bool:
    kwargs = fields.get("chat_template_kwargs", {})
    return fields.get("reasoning_effort") == "none" or kwargs.get("enable_thinking") is False


def _is_deep(value: Any) -> bool:
    level = [value] if type(value) in (dict, list) else []
    for _ in range(_MAX_DEPTH):
        level = [
            item
            for container in level
            for item in (container.values() if type(container) is dict else container)
            if type(item) in (dict, list)
        ]
        if not level:
            return False
    return True


def _found(taken: dict[str, Any]) -> Iterable[Wanted]:
    for name, value in taken.items():
        if isinstance(value, Wanted):
            yield value
        elif name == "structured_outputs":
            yield from value
        elif name in _SOURCES and value:  # an empty one asks for nothing
            yield Wanted(_SOURCES[name][0], value, name)


def _calls(
    fields: dict[str, Any], wanted: Wanted | None, most: int, paths: Sequence[str]
) -> CallsWanted | None:
    """`paths` say where the functions of the tools stood."""
    choice, given = fields.get("tool_choice", "auto"), fields.get("tools", ())
    tools = tuple(_tool(tool, path) for tool, path in zip(given, paths, strict=True))
    if not tools or choice == "none":
        return None
    if isinstance(choice, tuple):
        named = tuple(tool for tool in tools if tool.name == choice[0])
        return CallsWanted(named, True, 1, "tool_choice")
    if choice == "required":
        return CallsWanted(tools, True, most, "tool_choice")
    strict = next((i for i, tool in enumerate(tools) if tool.is_strict), None)
    if wanted is None and strict is None:
        return None
    path = "tools" if strict is None else f"{paths[strict]}.strict"
    return CallsWanted(tools, False, most, path)


def _tool(tool: dict[str, Any], path: str) -> Tool:
    function = tool["function"]
    return Tool(
        function["name"],
        _NO_ARGUMENTS if function.get("parameters") is None else function["parameters"],
        f"{path}.parameters",
        bool(function.get("strict")),
    )


_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
