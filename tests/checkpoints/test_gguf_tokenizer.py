"""Ids equal those of the tokenizer that a file was made from."""

import json
from functools import cache
from pathlib import Path

import gguf
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from headrace_common.checkpoints.gguf_header import read_gguf
from headrace_common.checkpoints.gguf_tokenizer import build_tokenizer
from headrace_common.errors import ModelError
from tools.harness.gguf_files import add_tokenizer
from tools.harness.small_tokenizers import CORPUS, library

TEXTS = st.one_of(
    st.text(max_size=60),
    st.lists(st.sampled_from([*" ".join(CORPUS).split(" "), "", "\n", "<|im_end|>"])).map(" ".join),
)
PRE = {"gpt2": "gpt-2", "llama3": "llama-bpe", "qwen": "qwen2", "single_digits": "smollm"}


def through_a_file(path: Path, described: dict, **fields: object) -> Tokenizer:
    writer = gguf.GGUFWriter(path, "llama")
    add_tokenizer(writer, described, fields)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return build_tokenizer(read_gguf(path))


@cache
def pair(kind: str, folder: Path) -> tuple[Tokenizer, Tokenizer]:
    original = library(kind)
    fields = {"pre": PRE[kind], "bos_token_id": original.token_to_id("<s>")}
    if kind == "llama3":
        fields["add_bos_token"] = True
    return original, through_a_file(folder / kind, json.loads(original.to_str()), **fields)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@pytest.mark.parametrize("kind", PRE)
@settings(max_examples=60, deadline=None)
@given(text=TEXTS)
def test_byte_level_ids_are_the_originals(kind: str, folder: Path, text: str) -> None:
    original, found = pair(kind, folder)
    ids = found.encode(text).ids
    assert ids == original.encode(text).ids
    assert found.decode(ids) == original.decode(ids)


@cache
def gemma4(folder: Path) -> tuple[Tokenizer, Tokenizer]:
    original = library("gemma")
    described = json.loads(original.to_str())
    fields = {"model": "gemma4", "pre": "gemma4", "bos_token_id": original.token_to_id("<s>")}
    return original, through_a_file(folder / "gemma4", described, **fields)


@settings(max_examples=60, deadline=None)
@given(text=TEXTS)
def test_ids_of_gemma_4_are_the_originals(folder: Path, text: str) -> None:
    original, found = gemma4(folder)
    ids = found.encode(text, add_special_tokens=False).ids
    assert ids == original.encode(text, add_special_tokens=False).ids
    assert found.decode(ids) == original.decode(ids)
    assert found.encode(text).ids == [original.token_to_id("<s>"), *ids]


@cache
def sentence_piece(folder: Path) -> tuple[sentencepiece.SentencePieceProcessor, Tokenizer]:
    corpus = folder / "corpus.txt"
    corpus.write_text("\n".join(CORPUS))
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(folder / "spm"),
        vocab_size=600,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=["<|im_end|>"],
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / "spm.model"))
    writer = gguf.GGUFWriter(folder / "spm.gguf", "llama")
    writer.add_tokenizer_model("llama")
    numbers = range(processor.vocab_size())
    writer.add_token_list([processor.id_to_piece(n) for n in numbers])
    writer.add_token_scores([processor.get_score(n) for n in numbers])

    def kind(n: int) -> int:
        if processor.is_unknown(n):
            return 2
        if processor.is_control(n):
            return 3
        if processor.is_byte(n):
            return 6
        return 4 if processor.id_to_piece(n) == "<|im_end|>" else 1

    writer.add_token_types([kind(n) for n in numbers])
    writer.add_bos_token_id(processor.bos_id())
    writer.add_unk_token_id(processor.unk_id())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return processor, build_tokenizer(read_gguf(folder / "spm.gguf"))


@settings(max_examples=150, deadline=None)
@given(
    text=TEXTS.filter(lambda text: "\0" not in text and "<" not in text and "\u2581" not in text)
)
def test_sentencepiece_ids_are_the_originals(folder: Path, text: str) -> None:
    processor, found = sentence_piece(folder)
    expected = [processor.bos_id(), *processor.encode(text)]
    assert found.encode(text).ids == expected
    assert found.decode(expected) == processor.decode(expected)


def test_a_special_token_is_one_token(folder: Path) -> None:
    found = sentence_piece(folder)[1]
    assert found.encode("a<|im_end|>").tokens[-1] == "<|im_end|>"


@pytest.mark.parametrize(
    "change, why",
    [
        ({"pre": "marvellous"}, "pre-tokenizer is marvellous"),
        ({"model": "bert"}, "its type is bert"),
        ({"bos_token_id": 99_999, "add_bos_token": True}, "first token"),
    ],
)
def test_what_is_not_known_is_named(tmp_path: Path, change: dict, why: str) -> None:
    described = json.loads(library("gpt2").to_str())
    with pytest.raises(ModelError, match=why):
        through_a_file(tmp_path / "x.gguf", described, **change)
