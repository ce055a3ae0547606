"""Reads and writes the arguments of calls in formats that do not write them as JSON."""

import json
import re
from typing import Any

from headrace.text.parameter_types import json_type
from headrace.text.tool_formats.format import Call, CallDelta, StringTypes

LITERAL = re.compile(r"true|false|null|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?")
"""Matches a JSON value that is neither a string nor a list nor an object."""
PYTHON_LITERALS = {"True": "true", "False": "false", "None": "null"}
"""The literals of Python that models may write, and the literals of JSON."""


def read_json(text: str) -> Any:
    """Parse JSON. Raise ValueError for NaN and for numbers that exceed the largest double."""
    return json.loads(text, parse_constant=_refuse, parse_float=_finite)


def _refuse(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    return value if value - value == 0 else _refuse(text)


def value_of(text: str, types: tuple[str, ...]) -> Any:
    """Parse an argument that stood between tags: as JSON, or else as a string.

    If the parameter can be a string (see StringTypes), the text is a string unless it is the JSON
    of another of the parameter's types.
    """
    if types == ("string",):
        return text
    try:
        value = read_json(PYTHON_LITERALS.get(text, text))
    except (ValueError, RecursionError):
        return text
    is_string = types and (isinstance(value, str) or json_type(value) not in types)
    return text if is_string else value


def with_texts(name: str, arguments: dict[str, Any], types: StringTypes) -> Call:
    """Return the call; numbers become strings if the parameter can be a string but not a number.

    A model may omit the quotes of a text that looks like a number.
    """
    for key, value in arguments.items():
        known = types(name, key) if isinstance(value, int | float) else ()
        if known and json_type(value) not in known:
            arguments[key] = json.dumps(value)
    return name, arguments


def deltas_of(call: Call) -> tuple[CallDelta, CallDelta]:
    """Return the pieces of a complete call.

    Raise ValueError or RecursionError if JSON cannot represent the arguments.
    """
    name, arguments = call
    return CallDelta(name, ""), CallDelta("", as_json(arguments))


def as_json(arguments: dict[str, Any]) -> str:
    """Write arguments; halves of surrogate pairs, which UTF-8 cannot encode, become escapes."""
    text = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
    return text if is_unicode(text) else json.dumps(arguments)


def is_unicode(text: str) -> bool:
    """Return whether a text can be encoded: it contains no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
