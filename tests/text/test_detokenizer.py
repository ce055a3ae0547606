import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.text.detokenizer import Detokenizer
from tools.harness.small_tokenizers import CORPUS, KINDS, library, ours

BYTELESS = ["gpt2", "llama3", "qwen", "prefix_space", "added_qwen", "unigram", "wordpiece"]


def deltas(kind: str, ids: list[int], skip: bool = True) -> list[str]:
    detokenizer = Detokenizer(ours(kind), skip)
    return [*(detokenizer.feed(token_id) for token_id in ids), detokenizer.flush()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("skip", [True, False])
def test_joined_deltas_are_the_librarys_own_decode(kind, skip):
    for text in [*CORPUS, "<s> a<|im_end|> b</s>", "  ▁▁ a\n", ""]:
        ids = library(kind).encode(text).ids
        assert "".join(deltas(kind, ids, skip)) == library(kind).decode(ids, skip)


@pytest.mark.parametrize("kind", BYTELESS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_random_ids_decode_as_the_library_decodes_them(kind, data):
    last = ours(kind).vocab_size - 1
    ids = data.draw(st.lists(st.integers(0, last), max_size=12))
    assert "".join(deltas(kind, ids)) == library(kind).decode(ids)


@pytest.mark.parametrize("kind", ["llama2", "metaspace_first", "gemma"])
@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=20))
def test_texts_of_single_byte_tokens_decode_completely(kind, text):
    ids = library(kind).encode(text).ids
    assert "".join(deltas(kind, ids)) == library(kind).decode(ids)


@pytest.mark.parametrize("kind", ["gpt2", "llama2"])
def test_an_emoji_over_several_tokens_is_one_delta(kind):
    ids = ours(kind).encode("🦊", add_special_tokens=False)
    assert len(ids) >= 3
    shown = [delta for delta in deltas(kind, list(ids)) if delta.strip()]
    assert shown == ["🦊"]


def test_an_unfinished_code_point_at_the_end_becomes_a_replacement_character():
    ids = ours("gpt2").encode("a🦊", add_special_tokens=False)[:-1]
    assert "".join(deltas("gpt2", list(ids))) == "a\ufffd"


def test_a_broken_run_of_byte_tokens_keeps_the_characters_that_are_whole():
    byte = {value: library("llama2").token_to_id(f"<0x{value:02X}>") for value in range(256)}
    ids = [byte[value] for value in "é".encode() + b"\xff" + "ü".encode()]
    assert deltas("llama2", ids) == ["", "é", "\ufffd", "", "ü", ""]
    assert ours("llama2").decode(ids, True) == "é\ufffdü"


def test_text_that_continues_a_prompt_keeps_its_space():
    prompt = ours("llama2").encode("Once upon", add_special_tokens=False)
    more = ours("llama2").encode("a time", add_special_tokens=False)
    continued = Detokenizer(ours("llama2"), after=prompt[-1])
    fresh = Detokenizer(ours("llama2"))
    assert "".join(map(continued.feed, more)) == " a time"
    assert "".join(map(fresh.feed, more)) == "a time"


def test_a_prompt_of_a_special_token_alone_counts_as_a_texts_start():
    ids = ours("llama2").encode("time", add_special_tokens=True)
    detokenizer = Detokenizer(ours("llama2"), after=ids[0])
    assert "".join(map(detokenizer.feed, ids[1:])) == "time"


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from([0x61, 0x80, 0xA0, 0xC3, 0xE2, 0xED, 0xF0, 0x9F, 0xF4])))
def test_broken_bytes_decode_as_they_would_in_one_piece(values):
    byte = {value: library("llama2").token_to_id(f"<0x{value:02X}>") for value in range(256)}
    joined = "".join(deltas("llama2", [byte[value] for value in values]))
    assert joined == bytes(values).decode(errors="replace")


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from([0x61, 0x80, 0xA0, 0xC3, 0xE2, 0xED, 0xF0, 0x9F, 0xF4])))
def test_spans_cover_the_text_without_a_gap(values):
    byte = {value: library("llama2").token_to_id(f"<0x{value:02X}>") for value in range(256)}
    detokenizer, covered = Detokenizer(ours("llama2")), set()
    for value in values:
        detokenizer.feed(byte[value])
        start, end = detokenizer.span
        assert end == start + 1
        covered.add(start)
    detokenizer.flush()
    assert covered == set(range(detokenizer.num_chars))
