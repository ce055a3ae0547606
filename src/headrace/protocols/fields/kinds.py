"""Defines the entries of tables that describe request fields: type, range, and effect.

A kind checks a value and also describes the value for OpenAPI, so the checks match the
description. Values are neither clamped nor converted: "16" is not an integer, and true is not
a number. 16.0 is the integer 16, as in JSON Schema, because some languages write all numbers
with a fraction.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec

from headrace_common.errors import RequestError

INT64 = 1 << 63
_SHOWN_CHARS = 40


class Kind(Protocol):
    """The type and the range of a field's values."""

    def check(self, value: Any, path: str) -> Any:
        """Return the value as the program uses it.

        Raise RequestError with `path` if the value is wrong.
        """

    def schema(self) -> dict[str, Any]:
        """Return the JSON Schema of the values that `check` accepts."""


class Flag(msgspec.Struct, frozen=True):
    """true or false."""

    def check(self, value: Any, path: str) -> bool:
        if type(value) is not bool:
            raise wrong_type(value, path, "true or false")
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": "boolean"}


class Integer(msgspec.Struct, frozen=True):
    """An integer from `low` to `high`, or one of `also`; accepts 16.0 as 16."""

    low: int = -INT64
    high: int = INT64 - 1
    also: tuple[int, ...] = ()

    def check(self, value: Any, path: str) -> int:
        is_whole = type(value) is int or (type(value) is float and value.is_integer())
        if not is_whole:
            raise wrong_type(value, path, "an integer")
        if not self.low <= value <= self.high and value not in self.also:
            beside = "".join(f" or {other}" for other in self.also)
            raise wrong_value(value, path, f"{_range(self.low, self.high)}{beside}")
        return int(value)

    def schema(self) -> dict[str, Any]:
        ranged = {"type": "integer", "minimum": self.low, "maximum": self.high}
        return {"anyOf": [ranged, {"enum": list(self.also)}]} if self.also else ranged


class Number(msgspec.Struct, frozen=True):
    """A number from `low` to `high`; `above` excludes `low` itself."""

    low: float
    high: float
    above: bool = False

    def check(self, value: Any, path: str) -> float:
        if type(value) is not int and type(value) is not float:
            raise wrong_type(value, path, "a number")
        if not self.low <= value <= self.high or (self.above and value == self.low):
            words = f"above {self.low:g} and at most {self.high:g}"
            raise wrong_value(value, path, words if self.above else _range(self.low, self.high))
        return float(value)

    def schema(self) -> dict[str, Any]:
        low = "exclusiveMinimum" if self.above else "minimum"
        return {"type": "number", low: self.low, "maximum": self.high}


class String(msgspec.Struct, frozen=True):
    """A string of `least` to `most` characters."""

    least: int = 0
    most: int | None = None

    def check(self, value: Any, path: str) -> str:
        if type(value) is not str:
            raise wrong_type(value, path, "a string")
        if len(value) < self.least or (self.most is not None and len(value) > self.most):
            most = f" to {self.most}" if self.most is not None else " or more"
            raise RequestError(
                "invalid_value",
                f"{path} has {len(value)} characters; it must have {self.least}{most}.",
                path,
            )
        return value

    def schema(self) -> dict[str, Any]:
        described: dict[str, Any] = {"type": "string", "minLength": self.least}
        return described if self.most is None else described | {"maxLength": self.most}


class Array(msgspec.Struct, frozen=True):
    """An array of up to `most` items of one kind."""

    item: Kind
    most: int
    least: int = 0

    def check(self, value: Any, path: str) -> tuple[Any, ...]:
        found = items_of(value, path, self.least, self.most)
        return tuple(self.item.check(*each) for each in found)

    def schema(self) -> dict[str, Any]:
        bounds = {"minItems": self.least, "maxItems": self.most}
        return {"type": "array", "items": self.item.schema()} | bounds


class Object(msgspec.Struct, frozen=True):
    """An object with `fields`. If `fields` is empty, any object is accepted and returned unchanged.

    The integers of an unchanged object must fit into 64 bits, so that the object can be stored.
    """

    fields: Mapping[str, Kind] = {}

    def check(self, value: Any, path: str) -> dict[str, Any]:
        if type(value) is not dict:
            raise wrong_type(value, path, "an object")
        if self.fields:
            return read_fields(self.fields, value, f"{path}.")
        try:
            msgspec.msgpack.encode(value)
        except (OverflowError, TypeError, ValueError):
            message = f"{path} has an integer of more than 64 bits; send it as a string."
            raise RequestError("invalid_value", message, path) from None
        return value

    def schema(self) -> dict[str, Any]:
        properties = {name: nullable(kind) for name, kind in self.fields.items()}
        return {"type": "object", "properties": properties}


def read_fields(
    fields: Mapping[str, Kind], body: Mapping[str, Any], prefix: str = ""
) -> dict[str, Any]:
    """Check a body's fields in the order of `fields`; leave out missing fields and nulls."""
    return {
        name: kind.check(body[name], prefix + name)
        for name, kind in fields.items()
        if body.get(name) is not None
    }


def nullable(kind: Kind) -> dict[str, Any]:
    """Return the schema of a field that may be null. Null means the same as a missing field."""
    return {"anyOf": [kind.schema(), {"type": "null"}]}


def check_object(value: Any, path: str) -> None:
    """Raise RequestError if the value is not an object. The object's members are not checked."""
    if type(value) is not dict:
        raise wrong_type(value, path, "an object")


def items_of(
    value: Any, path: str, least: int, most: int, wanted: str = "an array"
) -> list[tuple[Any, str]]:
    """Return the items of an array with their paths. Raise RequestError for a wrong count."""
    if type(value) is not list:
        raise wrong_type(value, path, wanted)
    check_count(len(value), path, least, most)
    return [(item, f"{path}[{i}]") for i, item in enumerate(value)]


def required(container: Mapping[str, Any], name: str, path: str, kind: Kind) -> Any:
    """Return a field of the object at `path`. Raise RequestError if the field is missing."""
    if container.get(name) is None:
        raise missing(f"{path}.{name}")
    return kind.check(container[name], f"{path}.{name}")


def check_count(count: int, path: str, least: int, most: int) -> None:
    if not least <= count <= most:
        raise RequestError(
            "invalid_value", f"{path} has {count} items; it must have {least} to {most}.", path
        )


def missing(path: str) -> RequestError:
    return RequestError("missing_required_parameter", f"{path} is required.", path)


def wrong_type(value: Any, path: str, wanted: str) -> RequestError:
    return RequestError("invalid_type", f"{path} is {_type_of(value)}; it must be {wanted}.", path)


def wrong_value(value: Any, path: str, wanted: str) -> RequestError:
    return RequestError("invalid_value", f"{path} is {shown(value)}; it must be {wanted}.", path)


def shown(value: Any) -> str:
    """Return a value as JSON, short enough for a message.

    A caller in this process may pass a value that JSON cannot represent.
    """
    try:
        text = "not a number" if value != value else msgspec.json.encode(value).decode()
    except (TypeError, ValueError, OverflowError):
        text = f"a value that JSON cannot hold ({type(value).__name__})"
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"


def _range(low: float, high: float) -> str:
    if high >= INT64 - 1:
        return "a 64-bit integer" if low <= -INT64 else f"{low} or more"
    return f"from {low} to {high}"


def _type_of(value: Any) -> str:
    names = {bool: "a boolean", int: "an integer", float: "a number with a fraction"}
    named = names | {str: "a string", list: "an array", dict: "an object"}
    return named.get(type(value), "null" if value is None else f"of type {type(value).__name__}")
