"""Compares two sequences of tokens: which were lost, repeated, reordered or changed."""

from collections import Counter
from collections.abc import Sequence
from difflib import SequenceMatcher

import msgspec

KINDS = ("lost", "repeated", "reordered", "changed", "wrong failure", "silent")


class Violation(msgspec.Struct, frozen=True):
    """A violation. `number` counts tokens for the first four KINDS, else occurrences."""

    kind: str
    number: int
    what: str


def compare(got: Sequence[int], truth: Sequence[int], where: str) -> list[Violation]:
    """Return the differences; an empty list means that the sequences are equal."""
    if got == truth:
        return []
    if Counter(got) == Counter(truth):
        number = sum(a != b for a, b in zip(got, truth, strict=True))
        return [Violation("reordered", number, where)]
    sums: Counter[str] = Counter()
    matcher = SequenceMatcher(None, got, truth, autojunk=False)
    for tag, got_from, got_to, from_, to in matcher.get_opcodes():
        if tag == "delete":
            sums["repeated"] += got_to - got_from
        elif tag == "insert":
            sums["lost"] += to - from_
        elif tag == "replace":
            sums["changed"] += max(to - from_, got_to - got_from)
    same = next((i for i, (a, b) in enumerate(zip(got, truth, strict=False)) if a != b), len(got))
    shown = f"{where}: {len(got)} tokens instead of {len(truth)}, equal up to index {same}"
    return [Violation(kind, number, shown) for kind, number in sums.items()]


def compare_choices(
    got: dict[int, list[int]], truth: dict[int, list[int]], where: str
) -> list[Violation]:
    """Return the differences for every choice of an answer."""
    return [
        violation
        for index in sorted(got.keys() | truth.keys())
        for violation in compare(got.get(index, []), truth.get(index, []), f"{where}[{index}]")
    ]
