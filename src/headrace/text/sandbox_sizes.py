"""Bounds the size of a result before an operator, filter or method of a chat template runs.

So a template never creates a text of a gigabyte. All sizes are upper bounds in characters.
`size_of` walks through a value to bound the length of the value's text. The walk has a limit,
because lists that contain each other can have an endless text.
"""

import re
from collections.abc import Callable, Iterable, Mapping, MappingView, Sized
from functools import wraps
from itertools import islice
from types import MethodType
from typing import Any

from jinja2 import filters, pass_environment, pass_eval_context
from jinja2.utils import Namespace
from markupsafe import Markup

MAX_SIZE = 32 << 20  # characters of the output or of one value
_MAX_INT_BITS = 1 << 16
_MAX_DIGITS = 4000  # digits of a number that is rounded or printed
_MAX_INDENT = 100
_MAX_VALUES = 500_000  # entries of a list, or inner values of a printed value
_ENTRY = MAX_SIZE // _MAX_VALUES  # characters per entry of a list
_NAME = 40  # characters of a float, or of an object's name
_SPACES = "".join(sign for sign in map(chr, range(0x3001)) if sign.isspace())
_LINE_BREAKS = "".join(sign for sign in _SPACES if len(f"{sign}a".splitlines()) == 2)
_PERCENT = re.compile(r"%(?:\([^)]*\))?[#0\- +]*(\*|\d+)?(?:\.(\*|\d+)?)?")
_QUOTED = re.compile(r"%(?:\([^)]*\))?[-#0 +*.\d]*[hlL]?[ra]")
_NESTED_FIELD = re.compile(r"\{[^{}:]*:[^{}]*\{")
_NUMBERS = re.compile(r"\d+")


class Overrun(Exception):
    """Raised when a template exceeds a limit; the message names the limit."""


def check_size(size: int) -> None:
    """Raise Overrun if a result with this many characters is too large."""
    if size > MAX_SIZE:
        raise Overrun(f"wrote more than {MAX_SIZE >> 20} Mi characters")


def check_operator(operator: str, left: Any, right: Any) -> None:
    """Raise Overrun if the result of `left operator right` is too large."""
    if operator == "*":
        check_size(_repeated(left, right))
    elif operator in ("//", "%") and isinstance(left, int):
        _check_bits(left.bit_length())
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
    # `Markup.escape` is a class method that takes any value.
    if owner is Markup and name == "escape":
        check_size(6 * sum(map(size_of, (*arguments, *named.values()))))
    if not isinstance(owner, str | bytes):
        return arguments
    if name in _GROWING_METHODS:
        check_size(_GROWING_METHODS[name] * len(owner))
    elif name in ("split", "rsplit"):
        check_size(_ENTRY * _num_split(owner, *arguments, **named))
    elif name == "splitlines":
        check_size(_ENTRY * _num_parts(owner, _LINE_BREAKS))
    elif name in ("center", "ljust", "rjust", "zfill") and arguments:
        check_size(_whole(arguments[0]))
    elif name == "expandtabs":
        width = arguments[0] if arguments else named.get("tabsize", 8)
        check_size(len(owner) * max(1, _whole(width)))
    elif name == "replace" and len(arguments) >= 2:
        check_size(_replaced(owner, *arguments[:2]))
    elif name == "translate" and arguments:
        check_size(len(owner) * (1 + _longest(arguments[0])))
    elif name == "join" and arguments:
        pieces = listed(arguments[0])
        check_size(sum(map(size_of, pieces)) + len(owner) * len(pieces))
        return (pieces, *arguments[1:])
    return arguments


def bounded_format(method: Any, formatted: Callable[..., str] | None) -> Callable[..., str] | None:
    """Wrap the sandbox's own `str.format` with a check of the widths in the format string."""
    if formatted is None:
        return None
    text: str = method.__self__

    def wrapper(*arguments: Any, **named: Any) -> str:
        if _NESTED_FIELD.search(text.replace("{{", "")):
            raise Overrun("used an argument as the width of a formatted text")
        widths = sum(map(_of_digits, _NUMBERS.findall(text)))
        each = _printed((*arguments, *named.values()), is_quoted="!" in text)
        check_size(len(text) + widths + text.count("{") * each)
        return formatted(*arguments, **named)

    return wrapper


def check_json(value: Any, indent: Any, separators: Any) -> None:
    """Raise Overrun if the JSON of this value is too large."""
    width = len(indent) if isinstance(indent, str) else _whole(indent)
    if width > _MAX_INDENT:
        raise Overrun(f"indented by more than {_MAX_INDENT} characters")
    between = sum(map(len, separators)) if isinstance(separators, list | tuple) else 2
    check_size(size_of((value,), between, width))


def bounded_output(value: Any) -> Any:
    """Return a value that the template prints; raise Overrun if the value's text is too large."""
    if not isinstance(value, str):
        check_size(size_of(value))
    return value


def joined(parts: Iterable[Any]) -> str:
    """Return the joined texts of all parts; raise Overrun before the result is too large."""
    texts = BoundedPieces()
    texts.extend(str(bounded_output(part)) for part in parts)
    return "".join(texts)


class BoundedPieces(list[str]):
    """A list of texts that raises Overrun when their total length exceeds the limit."""

    def __init__(self) -> None:
        super().__init__()
        self._size = 0

    def append(self, piece: str) -> None:
        self._size += len(piece)
        check_size(self._size)
        super().append(piece)

    def extend(self, pieces: Iterable[str]) -> None:
        for piece in pieces:
            self.append(piece)


def listed(values: Any) -> Any:
    """Return the values, with an iterator turned into a list.

    Raises Overrun if there are more than _MAX_VALUES values.
    """
    found = values if isinstance(values, Sized) else list(islice(values, _MAX_VALUES + 1))
    if len(found) > _MAX_VALUES:
        raise Overrun(f"made a list of more than {_MAX_VALUES:,} entries")
    return found


def _center(value: str, width: int = 80) -> str:
    check_size(_whole(width) + size_of(value))
    return filters.do_center(value, width)


def _format(value: str, *arguments: Any, **named: Any) -> str:
    check_size(size_of(value))
    check_size(_printed_by_percent(str(value), named or arguments))
    return filters.do_format(value, *arguments, **named)


def _indent(s: Any, width: Any = 4, first: bool = False, blank: bool = False) -> Any:
    size = len(width) if isinstance(width, str) else _whole(width)
    check_size(len(s) + (1 + _num_parts(s, _LINE_BREAKS)) * (size + _ENTRY))
    return filters.do_indent(s, width, first, blank)


@pass_eval_context
def _join(context: Any, value: Any, d: Any = "", attribute: Any = None) -> Any:
    pieces = listed(value)
    texts = pieces
    if attribute is not None:
        texts = list(map(filters.make_attrgetter(context.environment, attribute), pieces))
    check_size(sum(map(size_of, texts)) + size_of(d) * len(pieces))
    return filters.sync_do_join(context, pieces, d, attribute)


@pass_eval_context
def _replace(context: Any, s: Any, old: Any, new: Any, count: int | None = None) -> Any:
    check_size(size_of(s) + size_of(old) + size_of(new))
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
    check_size(len(s) * (_ENTRY + len(wrapstring or "")))
    return filters.do_wordwrap(
        environment, s, width, break_long_words, wrapstring, break_on_hyphens
    )


def _batch(value: Any, linecount: int, fill_with: Any = None) -> Any:
    check_size(_ENTRY * _whole(linecount))
    return filters.do_batch(value, linecount, fill_with)


def _slice(value: Any, slices: int, fill_with: Any = None) -> Any:
    check_size(_ENTRY * _whole(slices))
    return filters.sync_do_slice(listed(value), slices, fill_with)


@pass_environment
def _sum(environment: Any, iterable: Any, attribute: Any = None, start: Any = 0) -> Any:
    """Add values with the operator `+`, which also joins lists; check each sum."""
    get = filters.make_attrgetter(environment, attribute) if attribute is not None else None
    for item in iterable:
        value = get(item) if get else item
        check_operator("+", start, value)
        start = start + value
    return start


def _round(value: float, precision: int = 0, method: Any = "common") -> float:
    if abs(precision) > _MAX_DIGITS:
        raise Overrun(f"rounded to more than {_MAX_DIGITS} digits")
    return filters.do_round(value, precision, method)


def _bounded_text(name: str, growth: int) -> Callable[..., Any]:
    """Wrap a Jinja filter that turns each character into at most `growth` characters."""
    filter_ = filters.FILTERS[name]

    # `wraps` also copies the attribute that tells Jinja to pass a context to the filter.
    @wraps(filter_)
    def bounded(*arguments: Any, **named: Any) -> Any:
        check_size(growth * sum(map(size_of, (*arguments, *named.values()))))
        return filter_(*arguments, **named)

    return bounded


def _bounded_list(name: str) -> Callable[..., Any]:
    """Wrap a Jinja filter that makes a list, and limit the number of values."""
    filter_ = filters.FILTERS[name]
    # If the filter takes a context, the values are its second argument.
    index = 1 if hasattr(filter_, "jinja_pass_arg") else 0

    @wraps(filter_)
    def bounded(*arguments: Any, **named: Any) -> Any:
        given = list(arguments)
        given[index] = listed(given[index])
        return filter_(*given, **named)

    return bounded


_GROWING = {
    **dict.fromkeys(("string", "trim", "truncate", "striptags", "safe"), 1),
    **dict.fromkeys(("capitalize", "lower", "upper"), 3),
    **dict.fromkeys(("e", "escape", "forceescape", "xmlattr"), 6),
    **dict.fromkeys(("urlencode", "pprint"), 12),
    # These filters make a list of the text's words.
    **dict.fromkeys(("title", "wordcount"), _ENTRY),
}
_GROWING_METHODS = {
    **dict.fromkeys(("capitalize", "casefold", "lower", "swapcase", "title", "upper", "hex"), 3),
    "encode": 12,
}

FILTERS: dict[str, Callable[..., Any]] = {
    **{name: _bounded_text(name, growth) for name, growth in _GROWING.items()},
    **{name: _bounded_list(name) for name in ("list", "sort", "unique", "groupby", "reverse")},
    "batch": _batch,
    "center": _center,
    "format": _format,
    "indent": _indent,
    "join": _join,
    "replace": _replace,
    "round": _round,
    "slice": _slice,
    "sum": _sum,
    "wordwrap": _wordwrap,
}
"""Jinja's own filters that multiply text, each with a size check before the filter runs."""


def _length(value: Any) -> int:
    if isinstance(value, list | tuple):
        return len(value) * _ENTRY
    return len(value) if isinstance(value, str | bytes) else 0


def _num_parts(text: str | bytes, signs: str) -> int:
    """Return the maximum number of parts into which these characters can split a text."""
    return sum(map(text.count, signs)) + 1 if isinstance(text, str) else len(text)


def _num_split(text: Any, sep: Any = None, maxsplit: Any = -1) -> int:
    """Return the maximum number of parts that `split` returns for these arguments."""
    num_parts = _num_parts(text, _SPACES) if sep is None else text.count(sep) + 1
    limit = _whole(maxsplit)
    return num_parts if limit < 0 else min(num_parts, limit + 1)


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
    """Return the size of a text after replacing `old` by `new`; 0 if the types do not match."""
    if not isinstance(old, type(text)) or not isinstance(new, type(text)):
        return 0
    number = text.count(old)  # type: ignore[arg-type]  # both are text, or both are bytes
    return len(text) + number * max(0, len(new) - len(old))


def _printed_by_percent(layout: str | bytes, values: Any) -> int:
    text = layout.decode("latin-1") if isinstance(layout, bytes) else layout
    values = values if isinstance(values, tuple) else (values,)
    fields = _PERCENT.findall(text)
    widths = 0
    for given in (number for field in fields for number in field if number):
        widths += sum(map(_whole, values)) if given == "*" else _of_digits(given)
    return len(text) + widths + len(fields) * _printed(values, _QUOTED.search(text))


def _printed(values: tuple[Any, ...], is_quoted: object) -> int:
    """Return the maximum length of one printed field; `is_quoted` says whether fields can show a
    repr.
    """
    return size_of(values) if is_quoted else sum(map(size_of, values))


def size_of(value: Any, between: int = 2, indent: int = 0) -> int:
    """Return the maximum length of a value's text; above MAX_SIZE if the walk was cut short.

    `between` is the size of the separators next to each inner value, and `indent` the size of one
    level of indentation.
    """
    if isinstance(value, str):
        return len(value)
    size, level, num_seen, depth = 0, [value], 0, 0
    while level and size <= MAX_SIZE:
        num_seen += len(level)
        size += len(level) * (between + 2 + indent * depth)
        depth += 1
        below: list[Any] = []
        for one in level:
            if size > MAX_SIZE:
                return size
            if isinstance(one, str | bytes):
                size += _quoted_size(one)
            elif isinstance(one, int):
                size += one.bit_length() // 3 + 1
            elif num_seen + len(below) + len(inside := _inside(one)) > _MAX_VALUES:
                return MAX_SIZE + 1
            else:
                size += _NAME
                below += inside
        level = below
    return size


def _quoted_size(text: str | bytes) -> int:
    """Return the maximum length of a text that Python or JSON writes in quotes with escapes."""
    if isinstance(text, bytes):
        return 4 * len(text)
    if not text.isascii():
        return 12 * len(text)
    return (2 if text.isprintable() else 6) * len(text)


def _inside(value: Any) -> list[Any]:
    """Return the inner values that the text of `value` shows."""
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    if isinstance(value, list | tuple | set | frozenset | MappingView):
        return list(value)  # type: ignore[arg-type]  # a view of a mapping can be iterated
    if isinstance(value, Namespace):
        return [value._Namespace__attrs]
    return [value.__self__] if isinstance(value, MethodType) else []
