"""Reads and writes the arguments of calls in formats that do not write them as JSON."""

import json
import re
from typing import Any

from headrace.text.tool_formats.format import Call, CallDelta, IsText

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


def value_of(text: str, is_text: bool) -> Any:
    """Parse an argument that stood between tags: as JSON, unless the tool declares a string."""
    if is_text:
        return text
    try:
        return read_json(PYTHON_LITERALS.get(text, text))
    except (ValueError, RecursionError):
        return text


def with_texts(name: str, arguments: dict[str, Any], is_text: IsText) -> Call:
    """Return the call with numbers turned into texts where the tool declares a string.

    A model may omit the quotes of a text that looks like a number.
    """
    for key, value in arguments.items():
        if isinstance(value, int | float) and is_text(name, key):
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
