"""Computes how large the results of a template's operators, filters and methods would be.

Each check runs before the call: a text that is to become a gigabyte wide is never made. The sizes
are upper bounds in characters, or in entries of a list.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

from jinja2 import filters, pass_environment, pass_eval_context

MAX_SIZE = 32 << 20  # characters of output, or of one value
_MAX_INT_BITS = 1 << 16
_MAX_DIGITS = 4000  # to which a number is rounded or printed
_MAX_INDENT = 100
_MAX_VALUES = 1_000_000  # within a value that is printed
_PERCENT = re.compile(r"%(?:\([^)]*\))?[#0\- +]*(\*|\d+)?(?:\.(\*|\d+)?)?")
_NUMBERS = re.compile(r"\d+")


class Overrun(Exception):
    """The template took too much; the message says what."""


def check_size(size: int) -> None:
    """Overrun if a result of so many characters is too large."""
    if size > MAX_SIZE:
        raise Overrun(f"wrote more than {MAX_SIZE >> 20} Mi characters")


def check_operator(operator: str, left: Any, right: Any) -> None:
    """Overrun if the result of `left operator right` is too large."""
    if operator == "*":
        check_size(_repeated(left, right))
    elif operator == "**" and isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() * abs(right))
    elif operator == "+":
        check_size(_length(left) + _length(right))
    elif operator == "%" and isinstance(left, str | bytes):
        check_size(_printed_by_percent(left, right))


def check_method(
    method: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Return the arguments if the result of this call is not too large; else raise Overrun."""
    owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
    if isinstance(owner, int) and name == "to_bytes":
        check_size(_whole(arguments[0] if arguments else named.get("length")))
    if not isinstance(owner, str | bytes):
        return arguments
    if name in ("center", "ljust", "rjust", "zfill") and arguments:
        check_size(_whole(arguments[0]))
    elif name == "expandtabs":
        width = arguments[0] if arguments else named.get("tabsize", 8)
        check_size(len(owner) * max(1, _whole(width)))
    elif name == "replace" and len(arguments) >= 2:
        check_size(_replaced(owner, *arguments[:2]))
    elif name == "translate" and arguments:
        check_size(len(owner) * (1 + _longest(arguments[0])))
    elif name == "join" and arguments:
        pieces = list(arguments[0])
        check_size(_printed(pieces) + len(owner) * len(pieces))
        return (pieces, *arguments[1:])
    return arguments


def bounded_format(method: Any, formatted: Callable[..., str] | None) -> Callable[..., str] | None:
    """`formatted`, the sandbox's own str.format of `method`, behind a check of its widths."""
    if formatted is None:
        return None
    text: str = method.__self__

    def wrapper(*arguments: Any, **named: Any) -> str:
        fields = text.count("{")
        widths = sum(map(_of_digits, _NUMBERS.findall(text)))
        if fields > text.count("{}"):  # a width may also be an argument: {:{}}
            widths += fields * sum(_whole(it) for it in (*arguments, *named.values()))
        check_size(len(text) + widths + fields * _printed((arguments, named)))
        return formatted(*arguments, **named)

    return wrapper


def check_indent(value: Any, indent: Any) -> None:
    """Overrun if JSON of this value with this indent is too large."""
    width = len(indent) if isinstance(indent, str) else _whole(indent)
    if width > _MAX_INDENT:
        raise Overrun(f"indented by more than {_MAX_INDENT} characters")


def _center(value: str, width: int = 80) -> str:
    check_size(_whole(width))
    return filters.do_center(value, width)


def _format(value: str, *arguments: Any, **named: Any) -> str:
    check_size(_printed_by_percent(str(value), named or arguments))
    return filters.do_format(value, *arguments, **named)


def _indent(s: Any, width: Any = 4, first: bool = False, blank: bool = False) -> Any:
    size = len(width) if isinstance(width, str) else _whole(width)
    check_size(len(s) + (1 + len(s)) * size if size > _MAX_INDENT else len(s))
    return filters.do_indent(s, width, first, blank)


@pass_eval_context
def _join(context: Any, value: Any, d: Any = "", attribute: Any = None) -> Any:
    pieces = list(value)
    check_size(_printed(pieces) + _printed(d) * len(pieces))
    return filters.sync_do_join(context, pieces, d, attribute)


@pass_eval_context
def _replace(context: Any, s: Any, old: Any, new: Any, count: int | None = None) -> Any:
    check_size(_replaced(str(s), str(old), str(new)))
    return filters.do_replace(context, s, old, new, count)


@pass_environment
def _wordwrap(
    environment: Any,
    s: str,
    width: int = 79,
    break_long_words: bool = True,
    wrapstring: str | None = None,
    break_on_hyphens: bool = True,
) -> str:
    check_size(len(s) * (1 + len(wrapstring or "")))
    return filters.do_wordwrap(
        environment, s, width, break_long_words, wrapstring, break_on_hyphens
    )


def _batch(value: Any, linecount: int, fill_with: Any = None) -> Any:
    check_size(_whole(linecount))
    return filters.do_batch(value, linecount, fill_with)


def _slice(value: Any, slices: int, fill_with: Any = None) -> Any:
    check_size(_whole(slices))
    return filters.sync_do_slice(value, slices, fill_with)


def _round(value: float, precision: int = 0, method: Any = "common") -> float:
    if abs(precision) > _MAX_DIGITS:
        raise Overrun(f"rounded to more than {_MAX_DIGITS} digits")
    return filters.do_round(value, precision, method)


FILTERS: dict[str, Callable[..., Any]] = {
    "batch": _batch,
    "center": _center,
    "format": _format,
    "indent": _indent,
    "join": _join,
    "replace": _replace,
    "round": _round,
    "slice": _slice,
    "wordwrap": _wordwrap,
}
"""Jinja's own filters that multiply text, each behind a check."""


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | bytes | list | tuple) else 0


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else 0


def _of_digits(digits: str) -> int:
    return int(digits) if len(digits) < 10 else MAX_SIZE + 1


def _longest(table: Any) -> int:
    values = table.values() if isinstance(table, Mapping) else ()
    return max((_length(value) for value in values), default=0)


def _repeated(left: Any, right: Any) -> int:
    if isinstance(left, int) and isinstance(right, int):
        _check_bits(left.bit_length() + right.bit_length())
        return 0
    count, repeated = (left, right) if isinstance(left, int) else (right, left)
    return _length(repeated) * _whole(count)


def _check_bits(num_bits: int) -> None:
    if num_bits > _MAX_INT_BITS:
        raise Overrun(f"computed with a number of more than {_MAX_INT_BITS:,} bits")


def _replaced(text: str | bytes, old: Any, new: Any) -> int:
    """Size of `text` once each `old` is `new`; wrong types are left to the call."""
    if not isinstance(old, type(text)) or not isinstance(new, type(text)):
        return 0
    number = text.count(old)  # type: ignore[arg-type]  # both are text, or both are bytes
    return len(text) + number * max(0, len(new) - len(old))


def _printed_by_percent(layout: str | bytes, values: Any) -> int:
    text = layout.decode("latin-1") if isinstance(layout, bytes) else layout
    fields = _PERCENT.findall(text)
    widths = 0
    for given in (number for field in fields for number in field if number):
        stars = values if isinstance(values, tuple) else (values,)
        widths += sum(map(_whole, stars)) if given == "*" else _of_digits(given)
    return len(text) + widths + len(fields) * _printed(values)


def _printed(value: Any) -> int:
    """Estimate the characters that `value` takes in a text; more than MAX_SIZE if it has too many
    values within it, as lists that contain each other may.
    """
    size, waiting, num_seen = 0, [value], 0
    while waiting and size <= MAX_SIZE:
        one = waiting.pop()
        num_seen += 1
        if num_seen + len(waiting) > _MAX_VALUES:
            return MAX_SIZE + 1
        if isinstance(one, str | bytes):
            size += len(one)
        elif isinstance(one, int):
            size += one.bit_length() // 3 + 1
        elif isinstance(one, Mapping):
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple):
            waiting += one
        else:
            size += 8
    return size
