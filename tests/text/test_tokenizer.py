import json
import os
from pathlib import Path

import pytest
from tokenizers import decoders

from headrace.text.tokenizer import Tokenizer
from headrace_common.checkpoints.find import MINI, find_model
from headrace_common.errors import ModelError
from tools.harness.small_tokenizers import CORPUS, KINDS, library, ours


def save(folder, kind: str = "llama3", config: str = '{"bos_token": {"content": "<s>"}}') -> None:
    (folder / "tokenizer.json").write_text(library(kind).to_str())
    (folder / "tokenizer_config.json").write_text(config)


def test_a_folder_gives_its_tokenizer(tmp_path):
    save(tmp_path)
    loaded = Tokenizer.load(tmp_path)
    assert (loaded.bos_token, loaded.eos_token) == ("<s>", None)
    assert list(loaded.encode("a b", True)) == library("llama3").encode("a b").ids


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_the_librarys(kind):
    for text in CORPUS:
        for special in (True, False):
            expected = library(kind).encode(text, add_special_tokens=special).ids
            assert list(ours(kind).encode(text, special)) == expected


def test_truncation_and_padding_stored_in_the_file_have_no_effect(tmp_path):
    inner = type(library("gpt2")).from_str(library("gpt2").to_str())
    inner.enable_truncation(3)
    inner.enable_padding(length=50)
    (tmp_path / "tokenizer.json").write_text(inner.to_str())
    expected = list(ours("gpt2").encode(CORPUS[0], False))
    assert list(Tokenizer.load(tmp_path).encode(CORPUS[0], False)) == expected


def test_the_bytes_of_tokens_join_to_the_text():
    for kind in ("gpt2", "qwen", "digits_from_the_right", "gemma"):
        ids = ours(kind).encode(CORPUS[4] + " 🦊", False)
        assert b"".join(map(ours(kind).token_bytes, ids)).decode() == CORPUS[4] + " 🦊"


def test_a_tokens_bytes_hold_its_leading_space_and_partial_characters():
    fox = ours("llama2").encode("🦊", False)
    assert b"\xf0" in [ours("llama2").token_bytes(token_id) for token_id in fox]
    (end,) = [library("wordpiece").token_to_id("the")]
    assert ours("wordpiece").token_bytes(end) == b" the"
    assert ours("llama2").token_text(library("llama2").token_to_id("<0xF0>")) == "\ufffd"


def test_special_tokens_are_known():
    special = ours("llama3").special_ids
    assert special == {library("llama3").token_to_id(t) for t in ("<s>", "</s>")} | {
        library("llama3").token_to_id(t) for t in ("<|im_start|>", "<|im_end|>")
    }
    assert ours("llama3").eos_token == "</s>"
    assert ours("llama3").vocab_size == library("llama3").get_vocab_size()


def test_ids_beyond_the_vocabulary_decode_to_nothing():
    assert ours("gpt2").decode([10_000_000], True) == ""
    assert ours("llama2").decode([10_000_000], True) == ""


@pytest.mark.parametrize("content", [None, "{}", "not json"])
def test_a_folder_without_a_readable_tokenizer_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError) as refused:
        Tokenizer.load(tmp_path)
    assert refused.value.code == "tokenizer_invalid"
    assert str(tmp_path) not in str(refused.value)


@pytest.mark.parametrize("config", ["[1]", "not json"])
def test_an_unreadable_config_is_refused_by_its_file_name(tmp_path, config):
    save(tmp_path, config=config)
    with pytest.raises(ModelError, match=r"tokenizer_config\.json cannot be read"):
        Tokenizer.load(tmp_path)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_pipe_in_place_of_a_file_does_not_block(tmp_path, name):
    save(tmp_path)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(ModelError, match=f"The model's {name} cannot be read"):
        Tokenizer.load(tmp_path)


def changed_mini(tmp_path: Path, **sections: object) -> Path:
    """Write headrace-mini's tokenizer.json with these sections replaced; return the folder."""
    content = json.loads((find_model(MINI) / "tokenizer.json").read_bytes())
    (tmp_path / "tokenizer.json").write_text(json.dumps(content | sections))
    return tmp_path


def test_a_tokenizer_that_makes_its_library_panic_is_refused(tmp_path):
    folder = changed_mini(
        tmp_path, normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    )
    with pytest.raises(ModelError, match="cannot be read") as refused:
        Tokenizer.load(folder)
    assert refused.value.code == "tokenizer_invalid"


def test_a_decoder_that_makes_its_library_panic_is_refused_before_an_answer_needs_it(tmp_path):
    decoder = {"type": "Strip", "content": "a", "start": 2**63, "stop": 2**63}
    tokenizer = Tokenizer.load(changed_mini(tmp_path, decoder=decoder))
    with pytest.raises(ModelError, match="decoder fails at token") as refused:
        tokenizer.check_spelling()
    assert refused.value.code == "tokenizer_invalid"


@pytest.mark.parametrize("token_id", [1 << 21, 4294967295, 1 << 70, -1])
def test_an_added_token_with_an_absurd_id_is_refused_by_name(tmp_path, token_id):
    added = [{"id": token_id, "content": "<far>", "special": True}]
    with pytest.raises(ModelError) as refused:
        Tokenizer.load(changed_mini(tmp_path, added_tokens=added))
    assert refused.value.code == "tokenizer_invalid"
    assert f"'<far>' in the model's tokenizer.json has the id {token_id:,}" in str(refused.value)


def test_a_token_of_a_megabyte_is_refused(tmp_path):
    added = [{"id": 9, "content": "x" * (1 << 20), "special": True}]
    with pytest.raises(ModelError, match="has 1,048,576 characters") as refused:
        Tokenizer.load(changed_mini(tmp_path, added_tokens=added))
    assert len(str(refused.value)) < 300


def test_an_unknown_decoder_is_refused():
    inner = type(library("gpt2")).from_str(library("gpt2").to_str())
    inner.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    with pytest.raises(ModelError, match="ByteLevel with Strip"):
        Tokenizer(inner.to_str().encode())


def test_ids_without_a_token_have_no_text_and_are_not_cached() -> None:
    tokenizer = ours("gpt2")
    table = tokenizer.bytes_by_id
    assert table is not None
    assert tokenizer.spell(10_000_000, None) == b"" and 10_000_000 not in table
    assert tokenizer.spell(0, None) == table[0] and 0 in table
