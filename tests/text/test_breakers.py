"""Compares the tokens of sequence breakers with a search of the whole vocabulary."""

import zlib

import numpy as np
import pytest

from headrace.text.breakers import BreakerFinder
from headrace.text.tokenizer import Tokenizer
from headrace_common.checkpoints.find import find_model
from tools.harness.small_tokenizers import KINDS, ours

Found = dict[tuple[int, ...], set[int]]
DEFAULTS = ["\n", ":", '"', "*"]
TEXTS = [*DEFAULTS, "the ", "aa", "the wheel", "\n\n", "Ende.", "é…", "", "e e"]


def naive(tokenizer: Tokenizer, texts: list[str]) -> Found:
    """Find the breakers as llama.cpp does, in the bytes of each token."""
    found: Found = {}
    for text in (text.encode() for text in texts if text):
        for token_id in range(tokenizer.vocab_size):
            word = tokenizer.token_bytes(token_id)
            if text in word:
                found.setdefault((), set()).add(token_id)
                continue
            for length in range(1, len(text)):
                if word.endswith(text[:length]):
                    rest = text[length:].decode(errors="replace")
                    tail = tuple(tokenizer.encode(rest, add_special_tokens=False)[:20])
                    found.setdefault(tail, set()).add(token_id)
    return found


def found_by(tokenizer: Tokenizer, texts: list[str]) -> Found:
    found: Found = {}
    for tail, packed in BreakerFinder(tokenizer).find(texts):
        found[tail] = set(np.cumsum(np.frombuffer(zlib.decompress(packed), np.int32)).tolist())
    return {tail: heads for tail, heads in found.items() if heads}


@pytest.mark.parametrize("kind", KINDS)
def test_breakers_equal_those_of_a_search_of_all_tokens(kind: str) -> None:
    tokenizer = ours(kind)
    assert found_by(tokenizer, TEXTS) == naive(tokenizer, TEXTS)


def test_each_token_of_a_vocabulary_is_looked_at() -> None:
    tokenizer = Tokenizer.load(find_model("headrace-mini"))
    assert found_by(tokenizer, TEXTS) == naive(tokenizer, TEXTS)
    assert all(":" in tokenizer.token_text(i) for i in found_by(tokenizer, [":"])[()])


def test_an_empty_breaker_matches_no_token() -> None:
    assert found_by(ours(KINDS[0]), []) == found_by(ours(KINDS[0]), [""]) == {}
