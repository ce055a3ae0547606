"""Compares patterns of numbers with exact arithmetic."""

import random
import re
from decimal import Decimal, localcontext

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.text.number_patterns import (
    NumberBounds,
    integer_pattern,
    multiples,
    number_pattern,
    text_of,
)

LARGE = st.integers(-(10**25), 10**25) | st.integers(-200, 200)
FINE = st.decimals(-120, 120, places=3) | LARGE.map(Decimal)


def bounds_of(one: Decimal, other: Decimal, dice: random.Random) -> NumberBounds:
    low, high = min(one, other), max(one, other)
    ends = [low if dice.random() < 0.8 else None, high if dice.random() < 0.8 else None]
    return NumberBounds(*ends, dice.random() < 0.5, dice.random() < 0.5)


def near(bounds: NumberBounds, step: Decimal, dice: random.Random) -> list[Decimal]:
    ends = [it for it in (bounds.low, bounds.high) if it is not None]
    with localcontext(prec=100):
        around = [it + n * step for it in ends for n in range(-12, 13)]
        inside = [dice.choice(ends) * Decimal(dice.random()) for _ in range(20)] if ends else []
        return [*around, *(it.quantize(step) for it in inside), Decimal(0), Decimal(10) ** 30]


@settings(deadline=None, max_examples=200)
@given(LARGE, LARGE, st.integers())
def test_a_pattern_of_integers_matches_those_within_the_bounds(a: int, b: int, seed: int) -> None:
    dice = random.Random(seed)
    bounds = bounds_of(Decimal(a), Decimal(b), dice)
    pattern = integer_pattern(bounds)
    for value in near(bounds, Decimal(1), dice):
        is_matched = pattern is not None and bool(re.fullmatch(pattern, str(int(value))))
        assert is_matched == bounds.holds(value), (pattern, value)


@settings(deadline=None, max_examples=200)
@given(FINE, FINE, st.integers())
def test_a_pattern_of_numbers_matches_those_within_the_bounds(
    a: Decimal, b: Decimal, seed: int
) -> None:
    dice = random.Random(seed)
    bounds = bounds_of(a, b, dice)
    pattern = number_pattern(bounds)
    for value in near(bounds, Decimal("0.0001"), dice):
        text = text_of(value)
        is_matched = pattern is not None and bool(re.fullmatch(pattern, text))
        assert is_matched == bounds.holds(value), (pattern, text)


def test_bounds_of_thousands_of_digits_are_shortened() -> None:
    bounds = NumberBounds(Decimal(0), Decimal("1e3000"))
    for make in (integer_pattern, number_pattern):
        pattern = make(bounds)
        assert pattern and len(pattern) < 30_000
        assert re.fullmatch(pattern, "7" * 90) and not re.fullmatch(pattern, "7" * 101)


def test_few_multiples_are_listed_exactly() -> None:
    cents = multiples(NumberBounds(Decimal(0), Decimal("0.35")), Decimal("0.07"), False)
    assert cents is not None
    assert [text_of(it) for it in cents] == ["0", "0.07", "0.14", "0.21", "0.28", "0.35"]
    assert multiples(NumberBounds(Decimal(0), Decimal(10) ** 9), Decimal(7), True) is None
