"""Turns token ids into characters, one token at a time; keeps only an unfinished code point."""

import re

from headrace.text.tokenizer import Tokenizer

_UNFINISHED = re.compile(
    rb"""(?: [\xc2-\xf4]
           | \xe0[\xa0-\xbf] | [\xe1-\xec\xee\xef][\x80-\xbf] | \xed[\x80-\x9f]
           | \xf0[\x90-\xbf][\x80-\xbf]? | [\xf1-\xf3][\x80-\xbf]{1,2} | \xf4[\x80-\x8f][\x80-\xbf]?
         )\Z""",
    re.VERBOSE,
)


class Detokenizer:
    """Decodes tokens one by one; the joined results equal the result of `Tokenizer.decode`.

    Each returned text has whole code points; the bytes of an unfinished code point wait in
    `pending`. If the text continues another text, `after` is the last token of the other text.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool = True, after: int | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._bytes = tokenizer.bytes_by_id
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._previous = None if after in self._skipped else after
        self.pending = b""
        # The number of characters returned so far.
        self.num_chars = 0
        # The range [start, end) of the characters that contain bytes of the last token.
        self.span = (0, 0)

    def feed(self, token_id: int) -> str:
        """Return the characters that this token completes."""
        if token_id in self._skipped:
            data = b""
        # In a vocabulary with bytes by id, the bytes do not depend on the preceding token.
        elif self._bytes is not None:
            data = self._bytes[token_id]
        else:
            data = self._tokenizer.spell(token_id, self._previous)
            self._previous = token_id
        if not data:
            self.span = (self.num_chars, self.num_chars)
            return ""
        # This is the fast path for most tokens.
        if data.isascii() and not self.pending:
            start = self.num_chars
            self.num_chars = end = start + len(data)
            self.span = (start, end)
            return data.decode()
        start = self.num_chars + _breaks(self.pending, data)
        text, self.pending = _whole_characters(self.pending + data)
        self.num_chars += len(text)
        self.span = (start, self.num_chars + bool(self.pending))
        return text

    def flush(self) -> str:
        """At the end of the text, return U+FFFD if a code point is unfinished."""
        text, self.pending = self.pending.decode(errors="replace"), b""
        self.num_chars += len(text)
        return text


def _whole_characters(data: bytes) -> tuple[str, bytes]:
    unfinished = _UNFINISHED.search(data, max(0, len(data) - 3))
    cut = unfinished.start() if unfinished else len(data)
    return data[:cut].decode(errors="replace"), data[cut:]


def _breaks(pending: bytes, data: bytes) -> bool:
    """Return whether `data` makes the code point in `pending` invalid.

    If so, U+FFFD precedes the text of `data`.
    """
    return bool(pending) and len((pending + data[:1]).decode(errors="replace")) > 1
