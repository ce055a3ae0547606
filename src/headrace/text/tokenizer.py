"""Characters to ids and back, by a model's tokenizer.json; never reads a chat template."""

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
from headrace.text.token_bytes import token_bytes_for
from headrace_common.checkpoints.small_file import read_small
from headrace_common.checkpoints.tokenizer_file import MAX_FILE, tokenizer_file
from headrace_common.errors import ModelError
from headrace_common.system.panics import STEERING

MAX_VOCABULARY = 1 << 21
"""All token ids must be smaller. The largest known vocabulary has about 900,000 tokens."""
_MAX_TOKEN = 1 << 14  # characters of one token's written form
_MAX_SHOWN = 50

_MARK = "▁"
_MARK_INSIDE = re.compile(f"[^{_MARK}]{_MARK}")
_MAX_SPELLED = 128 << 20  # bytes of all tokens, each spelled twice


class _Added(msgspec.Struct):
    id: int
    content: str


class _Sections(msgspec.Struct):
    """The parts of a tokenizer.json that matter here."""

    decoder: dict[str, Any] | None = None
    added_tokens: list[_Added] | None = None


class Tokenizer:
    """Thread-safe. `data` is the text of a tokenizer.json, `config` of a tokenizer_config.json.

    `lowers_case`: text is put in small letters before anything else.
    """

    def __init__(
        self, data: bytes, config: dict[str, Any] | None = None, lowers_case: bool = False
    ) -> None:
        sections = msgspec.json.decode(data, type=_Sections)
        _check_tokens({one.content: one.id for one in sections.added_tokens or ()})
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
        self.infill_marks = infill_marks(self.token_id)

    @classmethod
    def load(cls, folder: Path, lowers_case: bool = False) -> "Tokenizer":
        """The tokenizer of a model's folder; ModelError `tokenizer_invalid` if there is none.

        Takes seconds where an older kind must be converted first, which happens once.
        """
        name = "tokenizer_config.json"
        try:
            file = folder / name
            config = dict(json.loads(read_small(file))) if file.exists() else {}  # no list
            name = "tokenizer.json"
            return cls(read_small(tokenizer_file(folder), MAX_FILE), config, lowers_case)
        except ModelError:
            raise
        except STEERING:
            raise
        except BaseException as error:  # the library panics, or raises a bare Exception
            raise ModelError(
                f"The model's {name} cannot be read; download it again.",
                "tokenizer_invalid",
            ) from (error if isinstance(error, Exception) else None)

    def check_spelling(self) -> None:
        """Spell each token at the start of a text and after another token.

        Answers are spelled where a library must not crash or hang, so a process that can be killed
        does this first. ModelError if the library fails at a token, or if the tokens spell more
        text than a vocabulary can have.
        """
        token_ids = sorted(self._inner.get_vocab().values())
        anchor = self._anchor if self._anchor is not None else next(iter(token_ids), None)
        num_bytes = 0
        for token_id in token_ids:
            try:
                num_bytes += len(self.spell(token_id, None)) + len(self.spell(token_id, anchor))
            except STEERING:
                raise
            except BaseException as error:  # the library panics, or raises a bare Exception
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
        """The first `limit` ids of a text; the special tokens behind it stay."""
        if len(token_ids) <= limit:
            return token_ids
        behind = self.outer_ids[1] if with_special_tokens else array("i")
        return token_ids[: max(0, limit - len(behind))] + behind

    def encode_pair(self, first: str, second: str) -> "tuple[array[int], int]":
        """Ids of two texts as one, with outer special tokens, and where the second one begins."""
        pair = self._inner.encode(first, second)
        sequences = pair.sequence_ids
        start = sequences.index(1) if 1 in sequences else len(sequences)
        return array("i", pair.ids), start

    def encode_spans(self, text: str) -> tokenizers.Encoding:
        """Ids with their offsets and words, without outer special tokens."""
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
        """Whether a word may be encoded in two parts between these two tokens.

        True at a space mark after another character, if the vocabulary never joins such a pair.
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
        """All ids as one text; what a Detokenizer returns for them, joined.

        The library's own decode, but for broken runs of single-byte tokens: it gives up all of
        such a run, which no stream could foresee.
        """
        skipped = self.special_ids if skip_special_tokens else frozenset[int]()
        kept = [token_id for token_id in token_ids if token_id not in skipped]
        if self.bytes_by_id is not None:
            spelled = map(self.bytes_by_id.__getitem__, kept)
        else:
            spelled = map(self.spell, kept, [None, *kept])
        return b"".join(spelled).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The token's exact bytes, as they stand in the middle of a text."""
        return self.spell(token_id, self._anchor)

    def token_text(self, token_id: int) -> str:
        """The same as characters, with U+FFFD for partial ones."""
        return self.token_bytes(token_id).decode(errors="replace")

    @property
    def bos_token(self) -> str | None:
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens.get("eos_token")

    def token_id(self, token: str) -> int | None:
        """The id of a token by its written form."""
        found: int | None = self._inner.token_to_id(token)
        return found


def _check_tokens(ids: dict[str, int]) -> None:
    """ModelError for a token that would make a table of ids, or a text, absurdly large."""
    for token, token_id in ids.items():
        if 0 <= token_id < MAX_VOCABULARY and len(token) <= _MAX_TOKEN:
            continue
        what, most = f"has the id {token_id:,}", f"ids up to {MAX_VOCABULARY - 1:,}"
        if len(token) > _MAX_TOKEN:
            what, most = f"has {len(token):,} characters", f"up to {_MAX_TOKEN:,}"
        raise ModelError(
            f"The token {token[:_MAX_SHOWN]!r} in the model's tokenizer.json {what}, and {most} "
            "are accepted; download it again.",
            "tokenizer_invalid",
        )


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Named special tokens (`bos_token`, `unk_token` …); a config writes each as text or object."""
    found = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            found[name] = content
    return found
