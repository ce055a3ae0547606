import random
from itertools import islice

import pytest

from headrace.text import windowed_encoding
from headrace.text.tokenizer_probes import hard_texts
from headrace.text.windowed_encoding import Sizes, WindowedText
from tools.harness.small_tokenizers import KINDS, library, ours

NUM_TEXTS = 2_000
SMALL = Sizes(window=200, overlap=100)
PROSE = "The quick brown fox jumps over the lazy dog, isn't it? " * 40


def in_windows(kind: str, text: str, sizes: Sizes = SMALL, limit: int | None = None):
    encoding = WindowedText(ours(kind), text, sizes, ours(kind).outer_ids, limit)
    while encoding.advance():
        pass
    return encoding


def in_one_call(kind: str, text: str) -> list[int]:
    return library(kind).encode(text).ids


def num_windows(kind: str, text: str) -> int:
    encoding = WindowedText(ours(kind), text, SMALL)
    return 1 + sum(1 for _ in iter(encoding.advance, False))


@pytest.mark.parametrize("kind", KINDS)
def test_windows_give_the_ids_of_one_call_on_hard_texts(kind):
    texts = hard_texts(KINDS.index(kind) + 1, ours(kind).added_tokens)
    for number, text in enumerate(islice(texts, NUM_TEXTS // len(KINDS) + 1)):
        sizes = (SMALL, Sizes(window=400, overlap=200))[number % 2]
        assert list(in_windows(kind, text, sizes).token_ids) == in_one_call(kind, text), repr(text)


@pytest.mark.parametrize("kind", ["gpt2", "llama2", "unigram", "wordpiece"])
def test_prose_is_cut_wherever_a_window_ends(kind):
    assert num_windows(kind, PROSE) == 1 + -(-(len(PROSE) - 200) // 100)


def test_a_text_without_cuts_is_encoded_whole_in_growing_windows():
    assert num_windows("joined_words", PROSE) < 6
    assert list(in_windows("joined_words", PROSE).token_ids) == in_one_call("joined_words", PROSE)


@pytest.mark.parametrize("kind", ["llama2", "llama3", "unigram", "wordpiece"])
def test_begin_and_end_tokens_are_added_only_around_the_whole_text(kind):
    before, after = ours(kind).outer_ids
    ids = in_windows(kind, PROSE).token_ids
    assert len(before) + len(after) > 0
    inner = ids[len(before) : len(ids) - len(after)]
    assert not set(inner) & (set(before) | set(after))
    assert ids == before + ours(kind).encode(PROSE, False) + after


def test_encoding_stops_when_the_limit_is_passed():
    encoding = in_windows("gpt2", PROSE, limit=100)
    assert encoding.is_over
    assert 100 < len(encoding.token_ids) < 300


def test_a_text_within_its_limit_is_not_over():
    num_tokens = len(in_one_call("gpt2", PROSE))
    assert not in_windows("gpt2", PROSE, limit=num_tokens).is_over
    assert in_windows("gpt2", PROSE, limit=num_tokens - 1).is_over


def test_digits_grouped_from_the_right_wait_for_the_end_of_their_run():
    sizes = Sizes(window=400, overlap=100)  # the windows' ends are 300 apart: groups agree
    for seed in range(30):
        digits = "".join(random.Random(seed).choices("0123456789", k=1500 + seed))
        text = f"The digits are {digits} and so on."
        ids = list(in_windows("digits_from_the_right", text, sizes).token_ids)
        assert ids == in_one_call("digits_from_the_right", text)


def test_spaces_wait_for_an_added_token_that_strips_them():
    text = PROSE[:300] + " " * 900 + "<mask> more" + " " * 500
    for kind in ("added_metaspace", "added_llama2", "added_qwen"):
        assert list(in_windows(kind, text).token_ids) == in_one_call(kind, text)


def test_a_wider_window_that_rejects_an_earlier_cut_starts_again(monkeypatch):
    monkeypatch.setattr(windowed_encoding, "_has_two_classes", lambda text: True)
    text = PROSE[:160] + " " * 900 + "<mask> more"
    ids = list(in_windows("added_metaspace", text).token_ids)
    assert ids == in_one_call("added_metaspace", text)


# Ways to encode in parts that look right but give other ids.

TRAPS = "<s>Hello  there,\n\n  world e\u0301 12345<|im_end|> it's   x"


def by_pre_tokenizer_output(kind: str, text: str) -> list[int]:
    parts = [part for part, _ in library(kind).pre_tokenizer.pre_tokenize_str(text)]
    return [token for part in parts for token in ours(kind).encode(part, False)]


def by_blanks(kind: str, text: str) -> list[int]:
    return [token for part in text.split() for token in ours(kind).encode(part, False)]


def by_offsets(kind: str, text: str) -> list[int]:
    spans = [span for _, span in library(kind).pre_tokenizer.pre_tokenize_str(text)]
    parts = [text[start:end] for start, end in spans]
    return [token for part in parts for token in ours(kind).encode(part, False)]


def by_plain_windows(kind: str, text: str) -> list[int]:
    parts = [text[start : start + 10] for start in range(0, len(text), 10)]
    return [token for part in parts for token in ours(kind).encode(part, False)]


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "qwen", "prefix_space", "metaspace_first"])
@pytest.mark.parametrize("wrong_way", [by_pre_tokenizer_output, by_blanks, by_plain_windows])
def test_only_windows_give_the_ids_of_one_call_on_trap_texts(kind, wrong_way):
    text = TRAPS * 8
    assert wrong_way(kind, text) != list(ours(kind).encode(text, False))
    assert list(in_windows(kind, text).token_ids) == in_one_call(kind, text)


@pytest.mark.parametrize("kind", ["prefix_space", "added_metaspace", "added_qwen"])
def test_cutting_the_text_by_offsets_of_words_is_wrong_too(kind):
    text = "a lot  <mask> of  words, e\u0301 a slot " * 12
    assert by_offsets(kind, text) != list(ours(kind).encode(text, False))
    assert list(in_windows(kind, text).token_ids) == in_one_call(kind, text)
