"""Messages of a chat: checked, and written as chat templates expect them."""

from typing import Any

import msgspec

from headrace.core.errors import RequestError
from headrace.protocols.fields import (
    Array,
    Kind,
    Object,
    String,
    check_count,
    missing,
    nullable,
    shown,
    wrong_type,
    wrong_value,
)

MAX_MESSAGES = 10_000
TEXT_PARTS = ("text", "input_text", "output_text")
"""Text in a chat's words, and in those of clients that speak of responses."""

ROLES = ("system", "developer", "user", "assistant", "tool")
_AS_THEY_ARE: dict[str, Kind] = {
    "name": String(),
    "tool_calls": Array(Object(), most=128),
    "tool_call_id": String(),
    "reasoning_content": String(),
    "reasoning": String(),
}


class Messages(msgspec.Struct, frozen=True):
    """The field `messages`, read as a tuple of what the template will see."""

    def check(self, value: Any, path: str) -> tuple[dict[str, Any], ...]:
        if type(value) is not list:
            raise wrong_type(value, path, "an array")
        check_count(len(value), path, 1, MAX_MESSAGES)
        return tuple(_message(item, f"{path}[{i}]") for i, item in enumerate(value))

    def schema(self) -> dict[str, Any]:
        part = {
            "type": "object",
            "properties": {"type": {"enum": list(TEXT_PARTS)}, "text": {"type": "string"}},
            "required": ["type", "text"],
        }
        content = [{"type": "string"}, {"type": "array", "items": part}, {"type": "null"}]
        properties = {name: nullable(kind) for name, kind in _AS_THEY_ARE.items()}
        message = {
            "type": "object",
            "properties": {"role": {"enum": list(ROLES)}, "content": {"anyOf": content}}
            | properties,
            "required": ["role"],
        }
        return {"type": "array", "items": message, "minItems": 1, "maxItems": MAX_MESSAGES}


def _message(value: Any, path: str) -> dict[str, Any]:
    if type(value) is not dict:
        raise wrong_type(value, path, "an object")
    if value.get("role") is None:
        raise missing(f"{path}.role")
    role = String().check(value["role"], f"{path}.role")
    if role not in ROLES:
        raise wrong_value(role, f"{path}.role", f"one of {', '.join(ROLES)}")
    message = {"role": role, "content": _content(value.get("content"), role, f"{path}.content")}
    for name, kind in _AS_THEY_ARE.items():
        if value.get(name) is not None:
            kind.check(value[name], f"{path}.{name}")
            message[name] = value[name]
    return message


def _content(value: Any, role: str, path: str) -> str:
    if value is None:
        if role != "assistant":
            raise missing(path)
        return ""  # templates print None as a word
    if type(value) is str:
        return value
    if type(value) is not list:
        raise wrong_type(value, path, "a string or an array of parts")
    return "".join(part_text(part, f"{path}[{i}]") for i, part in enumerate(value))


def part_text(value: Any, path: str) -> str:
    """The text of one part; RequestError if it is of another kind."""
    if type(value) is not dict:
        raise wrong_type(value, path, "an object")
    for name in ("type", "text"):
        given = value.get(name)
        if given is None:
            raise missing(f"{path}.{name}")
        if name == "type" and String().check(given, f"{path}.type") not in TEXT_PARTS:
            raise RequestError(
                "unsupported_content",
                f"{path} is of type {shown(given)}; this model takes text only.",
                f"{path}.type",
            )
    return String().check(value["text"], f"{path}.text")
