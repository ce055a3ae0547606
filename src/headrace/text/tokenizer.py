"""Encodes and decodes text with a model's tokenizer.json; knows no chat templates."""

import json
import re
from array import array
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import tokenizers

from headrace.text.infill import infill_marks
from headrace.text.known_pieces import AddedToken, cut_marks
from headrace.text.token_bytes import token_bytes_for
from headrace_common.checkpoints.small_file import read_small
from headrace_common.checkpoints.tokenizer_file import MAX_FILE, tokenizer_file
from headrace_common.errors import ModelError
from headrace_common.system.panics import STEERING

MAX_VOCABULARY = 1 << 21
"""All token ids must be smaller than this number. The largest vocabularies have about 900,000."""
_MAX_TOKEN = 1 << 14  # characters of a token in tokenizer.json
_MAX_SHOWN = 50

_MARK = "▁"
_MARK_INSIDE = re.compile(f"[^{_MARK}]{_MARK}")
_MAX_SPELLED = 128 << 20  # bytes of all tokens, with each token spelled twice


class _Sections(msgspec.Struct):
    """The sections of a tokenizer.json that this module uses."""

    decoder: dict[str, Any] | None = None
    added_tokens: list[AddedToken] | None = None


class Tokenizer:
    """Encodes text and decodes token ids; thread-safe.

    `data` is the content of a tokenizer.json, and `config` the parsed tokenizer_config.json. With
    `lowers_case`, text is converted to lower case first.
    """

    def __init__(
        self, data: bytes, config: dict[str, Any] | None = None, lowers_case: bool = False
    ) -> None:
        sections = msgspec.json.decode(data, type=_Sections)
        listed = sections.added_tokens or []
        _check_tokens({one.content: one.id for one in listed})
        self._inner = tokenizers.Tokenizer.from_buffer(data)
        self._inner.no_truncation()
        self._inner.no_padding()
        if lowers_case:
            own = self._inner.normalizer
            first = [tokenizers.normalizers.Lowercase(), *([own] if own else [])]
            self._inner.normalizer = tokenizers.normalizers.Sequence(first)
        vocabulary = self._inner.get_vocab()
        _check_tokens(vocabulary)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        token_bytes = token_bytes_for(self._inner, sections.decoder)
        self.spell, self.bytes_by_id = token_bytes.spell, token_bytes.by_id
        self.special_tokens = _special_tokens(config or {})
        added = self._inner.get_added_tokens_decoder()
        self.added_tokens = tuple(token.content for token in added.values())
        self.special_ids = frozenset(id for id, token in added.items() if token.special)
        named = self.special_tokens.values()
        special = (it.content for it in added.values() if it.special or it.content in named)
        self.special_texts = tuple(text for text in special if len(text) > 1)
        self._anchor = self._inner.token_to_id("a")
        # Splitting a text before one of these tokens does not change its ids.
        self.cut_marks = cut_marks(listed)
        self.infill_marks = infill_marks(self.token_id)

    @classmethod
    def load(cls, folder: Path, lowers_case: bool = False) -> "Tokenizer":
        """Load the tokenizer in a model's folder. Raises ModelError `tokenizer_invalid` on failure.

        The first call takes seconds if an older kind of tokenizer must be converted.
        """
        name = "tokenizer_config.json"
        try:
            file = folder / name
            # `dict` raises an error for a list.
            config = dict(json.loads(read_small(file))) if file.exists() else {}
            name = "tokenizer.json"
            return cls(read_small(tokenizer_file(folder), MAX_FILE), config, lowers_case)
        except ModelError:
            raise
        except STEERING:
            raise
        # The library `tokenizers` panics, or raises a bare Exception.
        except BaseException as error:
            raise ModelError(
                f"The model's {name} cannot be read; download it again.",
                "tokenizer_invalid",
            ) from (error if isinstance(error, Exception) else None)

    def check_spelling(self) -> None:
        """Compute the bytes of each token at the start of a text and after another token.

        The gateway computes these bytes for the tokens of answers, where the library must not
        crash or hang. So a process that can be killed calls this method first. Raises ModelError
        if the library fails at a token, or if the tokens spell more text than a vocabulary can
        have.
        """
        token_ids = sorted(self._inner.get_vocab().values())
        anchor = self._anchor if self._anchor is not None else next(iter(token_ids), None)
        num_bytes = 0
        for token_id in token_ids:
            try:
                num_bytes += len(self.spell(token_id, None)) + len(self.spell(token_id, anchor))
            except STEERING:
                raise
            # The library `tokenizers` panics, or raises a bare Exception.
            except BaseException as error:
                raise ModelError(
                    f"The tokenizer's decoder fails at token {token_id}; download the model again.",
                    "tokenizer_invalid",
                ) from (error if isinstance(error, Exception) else None)
            if num_bytes > _MAX_SPELLED:
                raise ModelError(
                    f"The tokenizer's decoder writes more than {_MAX_SPELLED >> 20} MiB for its "
                    f"{len(token_ids)} tokens; download the model again.",
                    "tokenizer_invalid",
                )

    def encode(self, text: str, add_special_tokens: bool) -> "array[int]":
        return array("i", self._inner.encode(text, add_special_tokens=add_special_tokens).ids)

    def cut(self, token_ids: "array[int]", limit: int, with_special_tokens: bool) -> "array[int]":
        """Truncate the token ids of a text to `limit`, but keep the special tokens at the end."""
        if len(token_ids) <= limit:
            return token_ids
        behind = self.outer_ids[1] if with_special_tokens else array("i")
        return token_ids[: max(0, limit - len(behind))] + behind

    def encode_pair(self, first: str, second: str) -> "tuple[array[int], int]":
        """Encode two texts with special tokens; return the ids and where the second text starts."""
        pair = self._inner.encode(first, second)
        sequences = pair.sequence_ids
        start = sequences.index(1) if 1 in sequences else len(sequences)
        return array("i", pair.ids), start

    def encode_spans(self, text: str) -> tokenizers.Encoding:
        """Encode a text without outer special tokens, with the offsets and the word of each id."""
        return self._inner.encode(text, add_special_tokens=False)

    @cached_property
    def outer_ids(self) -> "tuple[array[int], array[int]]":
        """The special tokens that `encode` adds before and after a text."""
        bare, full = self.encode("a", False), self.encode("a", True)
        num_before = next(
            start for start in range(len(full)) if full[start : start + len(bare)] == bare
        )
        return full[:num_before], full[num_before + len(bare) :]

    def is_cut_by_mark(self, before: int, token_id: int) -> bool:
        """Return whether the texts on both sides of the border between two tokens can be encoded
        separately.

        This is true if `token_id` begins with the space mark ▁ and `before` does not end with the
        mark. In addition, no token of the vocabulary may contain the mark after another
        character.
        """
        if not self._marks_cut:
            return False
        token = self._inner.id_to_token(token_id) or ""
        previous = self._inner.id_to_token(before) or ""
        return token.startswith(_MARK) and not previous.endswith(_MARK)

    @cached_property
    def _marks_cut(self) -> bool:
        vocabulary = self._inner.get_vocab(with_added_tokens=False)
        return not any(_MARK_INSIDE.search(token) for token in vocabulary)

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool) -> str:
        """Decode all ids to one text, which equals the joined results of a Detokenizer.

        The library's own decoder differs only for invalid sequences of single-byte tokens. The
        library drops the whole sequence; a stream cannot foresee this.
        """
        skipped = self.special_ids if skip_special_tokens else frozenset[int]()
        kept = [token_id for token_id in token_ids if token_id not in skipped]
        if self.bytes_by_id is not None:
            spelled = map(self.bytes_by_id.__getitem__, kept)
        else:
            spelled = map(self.spell, kept, [None, *kept])
        return b"".join(spelled).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the token's exact bytes in the middle of a text."""
        return self.spell(token_id, self._anchor)

    def token_text(self, token_id: int) -> str:
        """Return the token's text in the middle of a text, with U+FFFD for partial characters."""
        return self.token_bytes(token_id).decode(errors="replace")

    @property
    def bos_token(self) -> str | None:
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens.get("eos_token")

    def token_id(self, token: str) -> int | None:
        """Return the id of a token by its content in tokenizer.json."""
        found: int | None = self._inner.token_to_id(token)
        return found


def _check_tokens(ids: dict[str, int]) -> None:
    """Raise ModelError for an absurdly large token id or an absurdly long token."""
    for token, token_id in ids.items():
        if 0 <= token_id < MAX_VOCABULARY and len(token) <= _MAX_TOKEN:
            continue
        what, most = f"has the id {token_id:,}", f"only ids from 0 to {MAX_VOCABULARY - 1:,}"
        if len(token) > _MAX_TOKEN:
            what, most = f"has {len(token):,} characters", f"at most {_MAX_TOKEN:,}"
        raise ModelError(
            f"The token {token[:_MAX_SHOWN]!r} in the model's tokenizer.json {what}; {most} "
            "are accepted. Download the model again.",
            "tokenizer_invalid",
        )


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return the special tokens by name; in a config, a special token is a text or an object."""
    found = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            found[name] = content
    return found
