"""Tokenizes a long text in pieces, and caches the ids of the pieces.

A tokenizer first splits a text at its added tokens, such as <|im_start|>, and processes each part
independently. So splitting before such a token does not change the ids. Chat templates write these
tokens between messages. An agent sends the same conversation again and again, so most of its
pieces are in the cache.
"""

import hashlib
import re
import threading
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import pairwise
from typing import Protocol

import msgspec

# The form of special tokens: <|im_start|>, </s>, [INST].
_MARK = re.compile(r"<[^<>]{1,62}>|\[[^\[\]]{1,62}\]")
_MAX_IDS = 1 << 19
# The fixed cost of a cache entry, counted in ids.
_ENTRY = 64

Salt = tuple[str, str]
"""The key and the `cache_salt` of a request. Only requests with equal salts share cached ids."""


class AddedToken(msgspec.Struct):
    """An added token in tokenizer.json. With the default values, texts are not split before it."""

    id: int
    content: str
    single_word: bool = True
    lstrip: bool = True
    normalized: bool = True


class Encoding(Protocol):
    """A text that is being encoded; complete when `advance` has returned False."""

    token_ids: "array[int]"
    is_over: bool

    def advance(self) -> bool: ...


def cut_marks(added: Collection[AddedToken]) -> frozenset[str]:
    """Return the tokens before which a text can be split without changing its ids."""
    # A split must neither create nor destroy a match of an added token. So these are excluded:
    # - normalized tokens, because they are not matched against the raw text;
    # - tokens whose first character occurs inside some added token, because that token could span
    #   the split;
    # - tokens with the first character of a token that consumes the spaces before it (lstrip) or
    #   that depends on the characters around it (single_word).
    # All others start with < or [, which are neither white space nor part of a word. So a token
    # that ends at the split is still matched.
    unfit = {character for token in added for character in token.content[1:]}
    unfit |= {it.content[:1] for it in added if it.lstrip or it.single_word}
    normalized = {it.content for it in added if it.normalized}
    contents = {it.content for it in added} - normalized
    return frozenset(it for it in contents if it[:1] not in unfit and _MARK.fullmatch(it))


def cuts(text: str, marks: Collection[str], piece: int) -> Iterator[int]:
    """Yield the offsets of splits, at least `piece` characters apart.

    Texts with a common prefix are split identically within it.
    """
    start = 0
    for found in _MARK.finditer(text):
        if found.start() - start >= piece and found.group() in marks:
            start = found.start()
            yield start


class KnownIds:
    """An LRU cache of token ids, keyed by the hash of a piece's text. Thread-safe."""

    def __init__(self, max_ids: int = _MAX_IDS) -> None:
        self._max_ids = max_ids
        self._num_ids = 0
        self._entries: dict[tuple[Salt, bytes], array[int]] = {}
        self._lock = threading.Lock()

    def get(
        self, salt: Salt | None, piece: str, encode: "Callable[[str], Encoding]"
    ) -> "array[int]":
        """Return the ids of a piece. Without a salt, nothing is looked up or remembered."""
        if salt is None:
            return encode(piece).token_ids
        key = salt, hashlib.sha256(piece.encode()).digest()
        with self._lock:
            if (ids := self._entries.pop(key, None)) is not None:
                self._entries[key] = ids
                return ids
        encoding = encode(piece)
        if not encoding.is_over:
            self._put(key, encoding.token_ids)
        return encoding.token_ids

    def _put(self, key: tuple[Salt, bytes], ids: "array[int]") -> None:
        with self._lock:
            # Another thread may have encoded the same piece.
            if key in self._entries:
                return
            self._entries[key] = ids
            self._num_ids += len(ids) + _ENTRY
            while self._num_ids > self._max_ids:
                oldest = self._entries.pop(next(iter(self._entries)))
                self._num_ids -= len(oldest) + _ENTRY


class TextInPieces:
    """Encodes one piece with each `advance`; has the same interface as WindowedText."""

    def __init__(
        self,
        text: str,
        cuts: Iterable[int],
        begin: "Callable[[str, int | None], Encoding]",
        limit: int | None,
        known: KnownIds,
        salt: Salt | None,
    ) -> None:
        self._text = text
        self._bounds = pairwise((0, *cuts, len(text)))
        self._begin = begin
        self._limit = limit
        self._known, self._salt = known, salt
        self.token_ids = array("i")
        self.is_over = False

    def advance(self) -> bool:
        start, end = next(self._bounds)
        self.token_ids += self._known.get(self._salt, self._text[start:end], self._encode)
        self.is_over = self._limit is not None and len(self.token_ids) > self._limit
        return end < len(self._text) and not self.is_over

    def _encode(self, piece: str) -> "Encoding":
        left = None if self._limit is None else self._limit - len(self.token_ids)
        encoding = self._begin(piece, left)
        while encoding.advance():
            pass
        return encoding
