"""JSON as bodies may be written: strict, and with no more values than a worker can hold."""

import re
import sys
from typing import Any

import msgspec

from headrace.core.errors import RequestError

MAX_DEPTH = 64
MAX_VALUES = 2 << 20
MAX_CONTAINERS = 256 << 10
_LARGEST = int(sys.float_info.max)
_CONTAINERS = (dict, list)
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)


def decode(body: bytes) -> dict[str, Any]:
    """The object in the body: UTF-8 without a byte order mark, finite numbers, no lone surrogate.

    RequestError `invalid_json`, also for more values than are taken.
    """
    _check_counts(body)
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise RequestError("invalid_json", _reason(body, error)) from None
    if not isinstance(value, dict):
        raise RequestError("invalid_json", "The body must be a JSON object, such as {}.")
    _check_tree(value)
    return value


def _check_counts(body: bytes) -> None:
    """Before anything is made of it: a value may take 50 times the memory of its text."""
    num_quotes = body.count(b'"')
    counts = {mark: body.count(mark) for mark in (b",", b"[", b"{")}
    if sum(counts.values()) <= MAX_CONTAINERS:
        return
    if num_quotes > 4 * MAX_VALUES:
        raise _too_many(f"{num_quotes} quotation marks", 4 * MAX_VALUES)
    for found in _STRING.finditer(body):  # what stands in a string is no value
        for mark in counts:
            counts[mark] -= body.count(mark, *found.span())
    num_containers = counts[b"["] + counts[b"{"]
    if num_containers > MAX_CONTAINERS:
        raise _too_many(f"{num_containers} arrays and objects", MAX_CONTAINERS)
    if counts[b","] + num_containers > MAX_VALUES:
        raise _too_many(f"about {counts[b','] + num_containers} values", MAX_VALUES)


def _check_tree(root: dict[str, Any]) -> None:
    """Level by level, so that the depth costs no recursion."""
    level: list[Any] = [root]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for container in level:
            values = container.values() if type(container) is dict else container
            if any(type(x) is int and not -_LARGEST <= x <= _LARGEST for x in values):
                raise RequestError("invalid_json", "A number in the body is too large.")
            below += [x for x in values if type(x) in _CONTAINERS]
        if not below:
            return
        level = below
    raise _too_deep()


def _reason(body: bytes, error: ValueError) -> str:
    if body.startswith(b"\xef\xbb\xbf"):
        return "The body begins with a byte order mark; send plain UTF-8."
    if isinstance(error, UnicodeDecodeError):
        return "The body is not valid UTF-8."
    if isinstance(error, msgspec.ValidationError):
        return "A number in the body is too large."
    # the decoder's own words name a kind of fault and an offset, nothing else
    return f"The body is not valid JSON: {error}."


def _too_deep() -> RequestError:
    return RequestError("invalid_json", f"The body is nested deeper than {MAX_DEPTH} levels.")


def _too_many(what: str, limit: int) -> RequestError:
    message = f"The body has {what}; {limit} are taken. Send fewer at once."
    return RequestError("invalid_json", message)
