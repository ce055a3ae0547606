"""Finds the bytes that each token adds to a text, with the tokenizer's own decoder.

The bytes can depend on the preceding token, but not on earlier or later tokens. Examples are word
marks, joined word pieces, and a space that is dropped at the start of a text.
"""

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, Protocol

import tokenizers

from headrace_common.errors import ModelError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenBytes(Protocol):
    @property
    def by_id(self) -> Mapping[int, bytes] | None:
        """The bytes of each token, by token id; None if the bytes depend on the preceding token."""

    def spell(self, token_id: int, after: int | None) -> bytes:
        """Return the bytes that a token adds after the token `after`.

        `after` is None at the start of a text.
        """


class ByteLevelTokenBytes:
    """Handles vocabularies in which each of 256 printable characters represents a byte."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self.by_id = _BytesById(inner)

    def spell(self, token_id: int, after: int | None) -> bytes:
        return self.by_id[token_id]


class _BytesById(dict[int, bytes]):
    """Caches the bytes of tokens by id; ids without a token are not cached."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        super().__init__()
        self._inner = inner
        self._byte_of = _byte_of_character()

    def __missing__(self, token_id: int) -> bytes:
        token = self._inner.id_to_token(token_id)
        if token is None:
            return b""
        try:
            data = bytes([self._byte_of[character] for character in token])
        # An added token contains other characters and represents itself.
        except KeyError:
            data = token.encode()
        self[token_id] = data
        return data


class ProbedTokenBytes:
    """Handles all other vocabularies: decodes two tokens, and removes the text of the first token.

    If the decoder has a byte fallback, a token such as `<0xE2>` stands for a single byte. The byte
    is read from the token's name, because a single byte may not be valid text.
    """

    by_id: Mapping[int, bytes] | None = None

    def __init__(self, inner: tokenizers.Tokenizer, has_byte_tokens: bool) -> None:
        self._inner = inner
        self._has_byte_tokens = has_byte_tokens
        self._known = lru_cache(maxsize=1 << 16)(self._spell)

    def spell(self, token_id: int, after: int | None) -> bytes:
        return self._known(token_id, after)

    def _spell(self, token_id: int, after: int | None) -> bytes:
        byte = self._byte(token_id)
        if byte is not None and (after is not None or byte >= 0x80):
            return bytes([byte])
        if after is None:
            return self._decode(token_id).encode()
        before, both = self._decode(after), self._decode(after, token_id)
        return both.removeprefix(before).encode()

    def _byte(self, token_id: int) -> int | None:
        if not self._has_byte_tokens:
            return None
        match = _BYTE_TOKEN.fullmatch(self._inner.id_to_token(token_id) or "")
        return int(match[1], 16) if match else None

    def _decode(self, *token_ids: int) -> str:
        return self._inner.decode(token_ids, skip_special_tokens=False)


def token_bytes_for(inner: tokenizers.Tokenizer, decoder: dict[str, Any] | None) -> TokenBytes:
    """Return the token bytes for a tokenizer with this `decoder` section in its tokenizer.json."""
    parts = list(_parts(decoder))
    kinds = {part["type"] for part in parts}
    if any("Regex" in part.get("pattern", ()) for part in parts):
        # Matching a regular expression holds the interpreter's lock, and a hostile expression never
        # ends.
        raise ModelError(
            "The tokenizer's decoder finds text to replace with a regular expression, which is not "
            "supported; use a tokenizer whose decoder replaces plain strings.",
            "tokenizer_invalid",
        )
    if "ByteLevel" in kinds and kinds <= {"ByteLevel", "Fuse"}:
        return ByteLevelTokenBytes(inner)
    if "ByteLevel" in kinds:
        others = ", ".join(sorted(kinds - {"ByteLevel"}))
        raise ModelError(
            f"The tokenizer's decoder combines ByteLevel with {others}, which is not supported.",
            "tokenizer_invalid",
        )
    return ProbedTokenBytes(inner, "ByteFallback" in kinds)


def _parts(decoder: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Yield a decoder, or the decoders in a sequence."""
    if decoder is None:
        return
    if decoder["type"] != "Sequence":
        yield decoder
    for part in decoder.get("decoders", ()):
        yield from _parts(part)


def _byte_of_character() -> dict[str, int]:
    """Return the byte that each character represents.

    Printable Latin-1 characters represent their own bytes. The other 68 bytes are represented by
    the code points from 256 on.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {
        chr(256 + number): byte for number, byte in enumerate(moved)
    }
