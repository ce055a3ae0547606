"""Encodes prompts of any length: in one call, in pieces, or in windows.

Pieces and windows are used only if they give the same tokens as a single call.
"""

from array import array
from functools import cached_property
from itertools import islice

from headrace.text.known_pieces import Encoding, KnownIds, Salt, TextInPieces, cuts
from headrace.text.tokenizer import Tokenizer
from headrace.text.tokenizer_probes import hard_texts
from headrace.text.windowed_encoding import NO_OUTER, Sizes, WindowedText

NUM_PROBES = 200
MAX_PROBE = 600  # characters
_SIZES = Sizes()
_PROBE_SIZES = Sizes(window=200, overlap=100)


class WholeText:
    """Encodes a text in one call; has the same interface as WindowedText."""

    def __init__(
        self, tokenizer: Tokenizer, text: str, add_special_tokens: bool, limit: int | None
    ) -> None:
        self._tokenizer = tokenizer
        self._text = text
        self._add_special_tokens = add_special_tokens
        self._limit = limit
        self.token_ids = array("i")
        self.is_over = False

    def advance(self) -> bool:
        self.token_ids = self._tokenizer.encode(self._text, self._add_special_tokens)
        self.is_over = self._limit is not None and len(self.token_ids) > self._limit
        return False


class Encoder:
    """Starts encodings; thread-safe."""

    def __init__(self, tokenizer: Tokenizer, sizes: Sizes = _SIZES) -> None:
        self._tokenizer = tokenizer
        self._sizes = sizes
        self._known = KnownIds()

    @cached_property
    def can_stream(self) -> bool:
        """Whether windows and a single call give the same ids for all test texts.

        The first access takes about half a second: use a worker thread.
        """
        tokenizer = self._tokenizer
        probes = islice(hard_texts(0, tokenizer.added_tokens), NUM_PROBES)
        return all(_windows_agree(tokenizer, text[:MAX_PROBE], _PROBE_SIZES) for text in probes)

    def begin(
        self,
        text: str,
        add_special_tokens: bool,
        limit: int | None = None,
        salt: Salt | None = None,
    ) -> Encoding:
        """Start an encoding.

        The caller must call `advance` until False is returned, and then read `token_ids`. With a
        salt, the ids of the text's pieces are cached for texts with the same salt.
        """
        if add_special_tokens:
            return self._begin(text, limit, True)
        places = list(cuts(text, self._tokenizer.cut_marks, self._sizes.piece))
        if not places:
            return self._begin(text, limit)
        return TextInPieces(text, places, self._begin, limit, self._known, salt)

    def _begin(self, text: str, limit: int | None, add_special_tokens: bool = False) -> Encoding:
        if len(text) <= self._sizes.window or not self.can_stream:
            return WholeText(self._tokenizer, text, add_special_tokens, limit)
        outer = self._tokenizer.outer_ids if add_special_tokens else NO_OUTER
        return WindowedText(self._tokenizer, text, self._sizes, outer, limit)


def _windows_agree(tokenizer: Tokenizer, text: str, sizes: Sizes) -> bool:
    windows = WindowedText(tokenizer, text, sizes, tokenizer.outer_ids)
    while windows.advance():
        pass
    return windows.token_ids == tokenizer.encode(text, add_special_tokens=True)
