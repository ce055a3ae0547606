"""Builds regular expressions for decimal numbers within exact bounds of any size.

The grammar library compares floats, so the library would change bounds beyond 2^53.

A range of integers is split by the number of digits. Two bounds of the same length have a common
head, which is copied. After the head there are three cases. If the next digit is the lower bound's
digit, the rest must be large enough. If the next digit is the higher bound's digit, the rest must
be small enough. If the next digit is between these two digits, any rest is allowed.

Fractions work in the same way, digit by digit after the point.
"""

from collections.abc import Iterable
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import NamedTuple

MAX_DIGITS = 100
"""The maximum number of digits of a bound, on each side of the decimal point.

Patterns grow quadratically with this number.
"""

_MAX_MULTIPLES = 1000
_EXACT = Context(prec=4 * MAX_DIGITS)
_STEP = Decimal(1).scaleb(-MAX_DIGITS)
_LARGEST: int = 10**MAX_DIGITS - 1
_ANY_FRACTION = r"(\.[0-9]+)?"


class NumberBounds(NamedTuple):
    """The numbers from `low` to `high`; None means that a side has no bound."""

    low: Decimal | None = None
    high: Decimal | None = None
    is_low_excluded: bool = False
    is_high_excluded: bool = False

    def holds(self, value: Decimal) -> bool:
        is_low_kept = self.low is None or self.low < value
        is_high_kept = self.high is None or value < self.high
        is_low_kept |= value == self.low and not self.is_low_excluded
        is_high_kept |= value == self.high and not self.is_high_excluded
        return is_low_kept and is_high_kept

    @property
    def mirrored(self) -> "NumberBounds":
        """The bounds of the same numbers multiplied by -1."""
        low = None if self.high is None else self.high.copy_negate()
        high = None if self.low is None else self.low.copy_negate()
        return NumberBounds(low, high, self.is_high_excluded, self.is_low_excluded)


def integer_range(bounds: NumberBounds) -> tuple[int | None, int | None]:
    """Return the smallest and the largest integer within the bounds; None means no bound."""
    low = high = None
    if bounds.low is not None:
        low = _whole(bounds.low, ROUND_CEILING)
        low += bounds.is_low_excluded and low == bounds.low
    if bounds.high is not None:
        high = _whole(bounds.high, ROUND_FLOOR)
        high -= bounds.is_high_excluded and high == bounds.high
    return low, high


def integer_pattern(bounds: NumberBounds) -> str | None:
    """Return a pattern for the integers within the bounds; None if there is no such integer."""
    low, high = integer_range(bounds)
    parts: list[str] = []
    if low is None or low < 0:
        least = 1 if high is None or high >= 0 else -high
        parts += [f"-({it})" for it in _naturals(least, None if low is None else -low)]
    if high is None or high >= 0:
        parts += _naturals(max(low or 0, 0), high)
    return _either(parts)


def number_pattern(bounds: NumberBounds) -> str | None:
    """Return a pattern for the decimal fractions within the bounds; None if there is no such
    fraction.
    """
    bounds = _capped(bounds)
    parts: list[str] = []
    if bounds.low is None or bounds.low < 0:
        below = bounds.mirrored
        if below.low is None or below.low < 0:
            below = NumberBounds(Decimal(0), below.high, True, below.is_high_excluded)
        parts += [f"-({it})" for it in _positives(below)]
    if bounds.high is None or bounds.high >= 0:
        above = bounds
        if above.low is None or above.low < 0:
            above = NumberBounds(Decimal(0), above.high, False, above.is_high_excluded)
        parts += _positives(above)
    return _either(parts)


def multiples(bounds: NumberBounds, step: Decimal, is_integer: bool) -> list[Decimal] | None:
    """Return the multiples of a positive step within the bounds; None if there may be too many."""
    low, high = bounds.low, bounds.high
    if low is None or high is None or max(map(_size, (low, high, step))) > MAX_DIGITS:
        return None
    if (high - low) / step > _MAX_MULTIPLES:
        return None
    first, last = (_EXACT.divide(it, step) for it in (low, high))
    numbers = range(_whole(first, ROUND_CEILING) - 1, _whole(last, ROUND_FLOOR) + 2)
    found = (_EXACT.multiply(Decimal(n), step) for n in numbers)
    return [it for it in found if bounds.holds(it) and (not is_integer or is_whole(it))]


def is_whole(value: Decimal) -> bool:
    return value == value.to_integral_value()


def text_of(value: Decimal) -> str:
    """Return the number as JSON; whole numbers have no fraction."""
    if _size(value) > MAX_DIGITS:
        return str(value)
    text = f"{value:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _size(value: Decimal) -> int:
    """Return the number of digits before the point or after it, whichever is larger."""
    exponent = value.as_tuple().exponent
    assert isinstance(exponent, int)
    return max(abs(value.adjusted()), abs(exponent))


def _whole(value: Decimal, rounding: str) -> int:
    if value.adjusted() >= MAX_DIGITS:
        return _LARGEST if value > 0 else -_LARGEST
    return int(value.to_integral_value(rounding))


def _capped(bounds: NumberBounds) -> NumberBounds:
    """Shorten bounds with too many digits; the result is not wider than the given bounds."""
    low, high, is_low_excluded, is_high_excluded = bounds
    if low is not None and _size(low) > MAX_DIGITS:
        low, is_low_excluded = _rounded(low, ROUND_CEILING), True
    if high is not None and _size(high) > MAX_DIGITS:
        high, is_high_excluded = _rounded(high, ROUND_FLOOR), True
    return NumberBounds(low, high, is_low_excluded, is_high_excluded)


def _rounded(value: Decimal, rounding: str) -> Decimal:
    if value.adjusted() >= MAX_DIGITS:
        return Decimal(_LARGEST).copy_sign(value)
    return value.quantize(_STEP, rounding, _EXACT)


def _naturals(low: int, high: int | None) -> list[str]:
    """Return patterns for the integers from `low` to `high`; `low` is not negative."""
    first, least = len(str(low)), str(low)
    if high is None:
        top = "9" * first
        longer = f"[1-9][0-9]{{{first},}}"
        return [*_same_length(least, top), longer]
    if low > high:
        return []
    most = str(high)
    if first == len(most):
        return _same_length(least, most)
    between = range(first + 1, len(most))
    middle = [f"[1-9][0-9]{{{between[0] - 1},{between[-1] - 1}}}"] if between else []
    return [
        *_same_length(least, "9" * first),
        *middle,
        *_same_length("1" + "0" * (len(most) - 1), most),
    ]


def _same_length(low: str, high: str) -> list[str]:
    """Return patterns for the digit strings from `low` to `high`; both have the same length."""
    same = next((i for i in range(len(low)) if low[i] != high[i]), len(low))
    if same == len(low):
        return [low]
    head, rest = low[:same], len(low) - same - 1
    parts = [f"{head}{low[same]}{it}" for it in _tails(low[same + 1 :], "9")]
    if int(high[same]) - int(low[same]) > 1:
        digits = f"[{int(low[same]) + 1}-{int(high[same]) - 1}]"
        parts.append(f"{head}{digits}[0-9]{{{rest}}}")
    return parts + [f"{head}{high[same]}{it}" for it in _tails(high[same + 1 :], "0")]


def _tails(digits: str, end: str) -> Iterable[str]:
    """Yield patterns for the digit strings from `digits` up to 99…, or from `digits` down to 00….

    All strings have the length of `digits`. The direction is up if `end` is "9", and down if `end`
    is "0".
    """
    yield digits
    for i, digit in enumerate(digits):
        if digit != end:
            yield f"{digits[:i]}{_beyond(digit, end)}[0-9]{{{len(digits) - i - 1}}}"


def _beyond(digit: str, end: str) -> str:
    return f"[{int(digit) + 1}-9]" if end == "9" else f"[0-{int(digit) - 1}]"


def _positives(bounds: NumberBounds) -> list[str]:
    """Return patterns for the fractions within bounds; the lower bound exists and is at least 0."""
    assert bounds.low is not None
    low, low_fraction = _split(bounds.low)
    start = [f"{low}{it}" for it in _fractions_from(low_fraction, bounds.is_low_excluded)]
    if bounds.high is None:
        return start + [it + _ANY_FRACTION for it in _naturals(low + 1, None)]
    if bounds.high < bounds.low:
        return []
    high, high_fraction = _split(bounds.high)
    if low == high:
        is_low, is_high = bounds.is_low_excluded, bounds.is_high_excluded
        found = _fractions_between(low_fraction, high_fraction, is_low, is_high)
        return [f"{low}{it}" for it in found]
    middle = [it + _ANY_FRACTION for it in _naturals(low + 1, high - 1)]
    end = [f"{high}{it}" for it in _fractions_to(high_fraction, bounds.is_high_excluded)]
    return start + middle + end


def _split(value: Decimal) -> tuple[int, str]:
    """Return the integer part, and the digits after the point without trailing zeros."""
    text = f"{value:f}"
    whole, _, fraction = text.partition(".")
    return int(whole), fraction.rstrip("0")


def _fractions_from(digits: str, is_excluded: bool) -> Iterable[str]:
    """Yield patterns for all fractions of at least .`digits`; the point is part of the pattern."""
    if not digits:
        yield r"\.[0-9]*[1-9][0-9]*" if is_excluded else _ANY_FRACTION
        return
    yield rf"\.{digits}[0-9]*" + ("[1-9][0-9]*" if is_excluded else "")
    for i, digit in enumerate(digits):
        if digit != "9":
            yield rf"\.{digits[:i]}{_beyond(digit, '9')}[0-9]*"


def _fractions_to(digits: str, is_excluded: bool) -> Iterable[str]:
    """Yield patterns for all fractions of at most .`digits`; the point is part of the pattern."""
    if not digits:
        yield from () if is_excluded else (r"(\.0+)?",)
        return
    yield ""
    if not is_excluded:
        yield rf"\.{digits}0*"
    for i, digit in enumerate(digits):
        if i:
            # The digits have no trailing zeros, so a shorter head is a smaller number.
            yield rf"\.{digits[:i]}"
        if digit != "0":
            yield rf"\.{digits[:i]}{_beyond(digit, '0')}[0-9]*"


def _fractions_between(
    low: str, high: str, is_low_excluded: bool, is_high_excluded: bool
) -> Iterable[str]:
    if low == high:
        if not (is_low_excluded or is_high_excluded):
            yield rf"\.{low}0*" if low else r"(\.0+)?"
        return
    if not low and not is_low_excluded:
        yield ""
    padded = low.ljust(len(high), "0")
    high = high.ljust(len(padded), "0")
    same = next(i for i in range(len(high)) if padded[i] != high[i])
    head = high[:same]
    inner = padded[same + 1 :].rstrip("0")
    for found in _fractions_from(inner, is_low_excluded):
        if found == _ANY_FRACTION:
            yield rf"\.{head}{padded[same]}[0-9]*"
        else:
            yield rf"\.{head}{padded[same]}{found.removeprefix(chr(92) + '.')}"
    if int(high[same]) - int(padded[same]) > 1:
        digits = f"[{int(padded[same]) + 1}-{int(high[same]) - 1}]"
        yield rf"\.{head}{digits}[0-9]*"
    rest = high[same + 1 :].rstrip("0")
    for found in _fractions_to(rest, is_high_excluded):
        if found == r"(\.0+)?":
            yield rf"\.{head}{high[same]}0*"
        else:
            yield rf"\.{head}{high[same]}{found.removeprefix(chr(92) + '.')}"


def _either(parts: list[str]) -> str | None:
    return f"({'|'.join(parts)})" if parts else None
