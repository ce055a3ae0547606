"""Finds the tokens that can begin a sequence breaker of the DRY sampler."""

import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from headrace.text.tokenizer import Tokenizer

Ints = NDArray[np.int64]

_LONGEST_TAIL = 20  # tokens, as in llama.cpp


class BreakerFinder:
    """Searches the bytes of all tokens of a vocabulary for sequence breakers."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        spelled = [tokenizer.token_bytes(number) for number in range(tokenizer.vocab_size)]
        self._bytes = np.frombuffer(b"".join(spelled), np.uint8)
        self._ends = np.cumsum([len(token) for token in spelled], dtype=np.int64)

    def find(self, texts: Iterable[str]) -> list[tuple[tuple[int, ...], bytes]]:
        """Return the fields of each `Breaker`: a tail, and the packed tokens that can precede it.

        A token begins a text if the token contains the whole text, or ends with the start of the
        text. In the first case the tail is empty. In the second case the tail is the rest of the
        text, encoded separately, and must follow the token.
        """
        found: dict[tuple[int, ...], list[Ints]] = defaultdict(list)
        for text in filter(None, texts):
            *parts, (_, whole) = self._overlaps(text.encode())
            found[()].append(whole)
            for length, token_ids in parts:
                heads = np.setdiff1d(token_ids, whole)
                if len(heads):
                    found[self._tail(text, length)].append(heads)
        return [(tail, _packed(heads)) for tail, heads in found.items()]

    def _overlaps(self, text: bytes) -> Iterator[tuple[int, Ints]]:
        """For each length, yield the tokens that end with the first `length` bytes of the text.

        The last item contains the tokens that contain the whole text.
        """
        starts = np.flatnonzero(self._bytes == text[0])
        token_ids = np.searchsorted(self._ends, starts, side="right")
        for length in range(1, len(text)):
            is_end = self._ends[token_ids] == starts + length
            yield length, token_ids[is_end]
            starts, token_ids = starts[~is_end], token_ids[~is_end]
            goes_on = self._bytes[starts + length] == text[length]
            starts, token_ids = starts[goes_on], token_ids[goes_on]
        yield len(text), token_ids

    def _tail(self, text: str, length: int) -> tuple[int, ...]:
        """Return the tokens of the text after its first `length` bytes."""
        rest = text.encode()[length:].decode(errors="replace")
        return tuple(self._tokenizer.encode(rest, add_special_tokens=False)[:_LONGEST_TAIL])


def _packed(heads: list[Ints]) -> bytes:
    token_ids = np.unique(np.concatenate(heads))
    return zlib.compress(np.diff(token_ids, prepend=0).astype(np.int32).tobytes())
