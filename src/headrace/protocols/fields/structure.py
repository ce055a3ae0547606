"""Reads the structure that a body requires of the answer: a constraint, tool calls, or both.

This module needs no model. `grammars.py` turns the result into a grammar.
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
    """Reads a JSON Schema, sent as an object or as text."""

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
    """Reads the list of allowed answers."""

    def check(self, value: Any, path: str) -> tuple[str, ...]:
        found = items_of(value, path, 0, MAX_CHOICES, "an array of strings")
        return tuple(String(1).check(*each) for each in found)

    def schema(self) -> dict[str, Any]:
        return {"type": "array", "items": {"type": "string", "minLength": 1}}


class ResponseFormat(msgspec.Struct, frozen=True):
    """Reads `response_format` as an AnswerConstraint; returns None for plain text."""

    def check(self, value: Any, path: str) -> "AnswerConstraint | None":
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
        return AnswerConstraint("json", described["schema"], f"{path}.schema", is_strict)

    def schema(self) -> dict[str, Any]:
        properties: dict[str, Any] = {"type": {"enum": ["text", "json_object", "json_schema"]}}
        properties |= {"json_schema": {"type": "object"}, "schema": {"type": "object"}}
        return {"type": "object", "properties": properties}


def _object_of(value: dict[str, Any], path: str) -> "AnswerConstraint":
    """Return a constraint to any JSON object, or to the schema in llama.cpp's field `schema`."""
    if value.get("schema") is None:
        return AnswerConstraint("json", _ANY_OBJECT, path)
    check_object(value["schema"], f"{path}.schema")
    return AnswerConstraint("json", value["schema"], f"{path}.schema")


class AnswerConstraint(NamedTuple):
    """A constraint on the answer; `path` is the path of `value` in the body."""

    # Has the value json, regex, choice or grammar.
    syntax: str
    value: Any
    path: str
    # If a keyword cannot be enforced, True refuses the request and False leaves the keyword out.
    is_strict: bool = True


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
    """Reads vLLM's object, which has one of the keys json, regex, choice, grammar, json_object."""

    def check(self, value: Any, path: str) -> "tuple[AnswerConstraint, ...]":
        check_object(value, path)
        found = []
        for name, item in value.items():
            if name == "json_object" and item is True:
                found.append(AnswerConstraint("json", _ANY_OBJECT, f"{path}.json_object"))
            elif name in _OPTIONS and item is not None:
                syntax, kind = _OPTIONS[name]
                found.append(
                    AnswerConstraint(syntax, kind.check(item, f"{path}.{name}"), f"{path}.{name}")
                )
            elif item not in (None, False, "", [], {}):
                known = ", ".join((*_OPTIONS, "json_object"))
                message = f"{path}.{name} is not supported here; use one of {known}."
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
"""Fields that ask for a structure. Routes add them to their tables; `take` reads the values."""


class Tool(NamedTuple):
    """A tool that may be called; `path` is the path of its schema."""

    name: str
    schema: dict[str, Any]
    path: str
    is_strict: bool


class CallConstraint(NamedTuple):
    """Tool calls that must follow the tools' schemas. Forced calls make up the whole answer."""

    tools: tuple[Tool, ...]
    is_forced: bool
    most: int
    # The path of the field that asks for the calls.
    path: str


class Structure(NamedTuple):
    """The structure of the answer that a body asks for: a constraint, tool calls, or both."""

    wanted: AnswerConstraint | None
    calls: CallConstraint | None
    # Whether reasoning may precede the structure.
    may_reason: bool
    # Whether the answer is a whole chat message. If not, the answer continues a message or text.
    is_message: bool

    @property
    def path(self) -> str:
        constraint = self.wanted or self.calls
        assert constraint
        return constraint.path


def take(fields: dict[str, Any], exact: Mapping[int, Any] | None = None) -> Structure | None:
    """Remove the fields that ask for a structure; return the structure, or None.

    `exact` maps the `id()` of each schema to the same schema with exact numbers. Raise RequestError
    if the body has two constraints.
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
        message = f"tool_choice forces a tool call, but {wanted.path} asks for a different answer; "
        message += "send only one of them."
        raise RequestError("invalid_value", message, wanted.path)
    if calls:
        tools = (it._replace(schema=exact.get(id(it.schema), it.schema)) for it in calls.tools)
        calls = calls._replace(tools=tuple(tools))
    if not (wanted or calls):
        return None
    is_chat = "messages" in fields
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


def _found(taken: dict[str, Any]) -> Iterable[AnswerConstraint]:
    for name, value in taken.items():
        if isinstance(value, AnswerConstraint):
            yield value
        elif name == "structured_outputs":
            yield from value
        # An empty value asks for nothing.
        elif name in _SOURCES and value:
            yield AnswerConstraint(_SOURCES[name][0], value, name)


def _calls(
    fields: dict[str, Any], wanted: AnswerConstraint | None, most: int, paths: Sequence[str]
) -> CallConstraint | None:
    """Return the constraint on tool calls, or None if the calls need no grammar.

    `paths` has the path of each tool's function.
    """
    choice, offered = fields.get("tool_choice", "auto"), fields.get("tools", ())
    tools = tuple(_tool(tool, path) for tool, path in zip(offered, paths, strict=True))
    if not tools or choice == "none":
        return None
    if isinstance(choice, tuple):
        named = tuple(tool for tool in tools if tool.name == choice[0])
        return CallConstraint(named, True, 1, "tool_choice")
    if choice == "required":
        return CallConstraint(tools, True, most, "tool_choice")
    strict = next((i for i, tool in enumerate(tools) if tool.is_strict), None)
    if wanted is None and strict is None:
        return None
    path = "tools" if strict is None else f"{paths[strict]}.strict"
    return CallConstraint(tools, False, most, path)


def _tool(tool: dict[str, Any], path: str) -> Tool:
    function = tool["function"]
    return Tool(
        function["name"],
        _NO_ARGUMENTS if function.get("parameters") is None else function["parameters"],
        f"{path}.parameters",
        bool(function.get("strict")),
    )


_NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
