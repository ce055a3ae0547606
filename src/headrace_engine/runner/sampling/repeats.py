"""Finds where the last tokens of a growing sequence have occurred before."""

import zlib
from array import array
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from headrace_common.sampling import Breaker

Ints = NDArray[np.int64]


class Repeats:
    """Records how the end of a sequence matches earlier tokens, and where the last breaker is.

    Each new token costs a few vector operations over all earlier tokens. The first call runs the
    Z algorithm over the whole sequence, which takes linear time.
    """

    def __init__(self, breakers: tuple[Breaker, ...]) -> None:
        self.tokens: Ints = np.empty(0, np.int64)
        self.lengths: Ints = np.empty(0, np.int64)
        """How many tokens up to each token, except the last, equal the end of the sequence."""
        self.break_at = self.break_end = -1
        """The start and the end (exclusive) of the last breaker; -1 without a breaker."""
        self.breakers = _breakers_of(breakers)

    def update(self, token_ids: "array[int]") -> None:
        """Add the tokens since the last call; `token_ids` is the whole sequence."""
        num_before = len(self.tokens)
        if len(token_ids) == num_before:
            return
        self.tokens = np.array(token_ids, np.int64)
        if not num_before:
            self.lengths = _matches(token_ids.tobytes())
        for last in range(num_before, len(token_ids)) if num_before else ():
            longer = np.concatenate(([0], self.lengths)) + 1
            is_same = self.tokens[:last] == self.tokens[last]
            self.lengths = np.where(is_same, longer, 0)
        found = self.breakers.find_last(token_ids, self.tokens, num_before)
        if found is not None:
            self.break_at, self.break_end = found


class Breakers:
    """Holds the sequence breakers of a request, indexed by first token."""

    def __init__(self, given: Iterable[Breaker]) -> None:
        parts = [(breaker.tail, _unpacked(breaker.heads)) for breaker in given]
        self._tails = [tail for tail, _ in parts]
        self._longest = max(map(len, self._tails), default=0)
        heads = [ids for _, ids in parts] or [np.empty(0, np.int64)]
        numbers = np.repeat(np.arange(len(parts)), [len(ids) for _, ids in parts])
        order = np.argsort(np.concatenate(heads), kind="stable")
        self._heads, self._numbers = np.concatenate(heads)[order], numbers[order]
        # The later tokens of breakers, by the first token. An entry is added when the first token
        # occurs.
        self._tails_by_head: dict[int, list[tuple[int, ...]]] = {}
        self.whole = next((ids for tail, ids in parts if not tail), np.empty(0, np.int64))
        """The tokens whose text contains a whole breaker."""

    def find_last(
        self, token_ids: "array[int]", tokens: Ints, num_known: int
    ) -> tuple[int, int] | None:
        """Return the start and end (exclusive) of the last breaker; None without a new breaker.

        Earlier calls have searched the first `num_known` tokens, but a new breaker may start
        among these tokens.
        """
        first = max(0, num_known - self._longest)
        is_head = np.isin(tokens[first:], self._heads)
        for index in np.flatnonzero(is_head)[::-1] + first:
            following = token_ids[index + 1 : index + 1 + self._longest]
            tails = self._tails_of(token_ids[index])
            lengths = [len(tail) for tail in tails if tuple(following[: len(tail)]) == tail]
            if lengths:
                return int(index), int(index) + 1 + max(lengths)
        return None

    def _tails_of(self, head: int) -> list[tuple[int, ...]]:
        tails = self._tails_by_head.get(head)
        if tails is None:
            start, end = np.searchsorted(self._heads, [head, head + 1])
            tails = [self._tails[number] for number in self._numbers[start:end]]
            self._tails_by_head[head] = tails
        return tails


@lru_cache(maxsize=16)
def _breakers_of(given: tuple[Breaker, ...]) -> Breakers:
    """Unpack breakers once for all choices of a request."""
    return Breakers(given)


def _unpacked(heads: bytes) -> Ints:
    return np.cumsum(np.frombuffer(zlib.decompress(heads), np.int32), dtype=np.int64)


@lru_cache(maxsize=1)
def _matches(packed: bytes) -> Ints:
    """Return how many tokens up to each token, except the last, equal the sequence's end.

    The function runs the Z algorithm (Gusfield, 1997) over the reversed tokens. In the reversed
    order, lengths[i] is how many tokens from i on equal the first tokens. The match that reaches
    furthest to the right is tokens[left:right], which equals tokens[:right - left]. Inside this
    match, a length is copied from the start, and only tokens beyond `right` are compared. Each
    successful comparison moves `right`, so the time is linear. The cache helps because the
    choices of one prompt ask for the same sequence one after the other.
    """
    tokens = array("i", packed)[::-1].tolist()
    num = len(tokens)
    lengths = [0] * num
    # The match that reaches furthest to the right.
    left = right = 0
    for start in range(1, num):
        length = min(right - start, lengths[start - left]) if start < right else 0
        if start + length >= right:
            while start + length < num and tokens[length] == tokens[start + length]:
                length += 1
            left, right = start, start + length
        lengths[start] = length
    return np.array(lengths[:0:-1], np.int64)
