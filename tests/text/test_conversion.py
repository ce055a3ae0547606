import json
import subprocess

import pytest

from headrace.text.tokenizer import Tokenizer
from headrace_common.checkpoints.tokenizer_file import tokenizer_file
from headrace_common.errors import ModelError

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "quick", "fox", "##es", ",", "jump"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "headrace" / "tokenizers"


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "model"
    made.mkdir()
    return made


def save_bert(folder) -> None:
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    (folder / "config.json").write_text('{"model_type": "bert"}')
    config = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "sep_token": "[SEP]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_a_vocabulary_of_word_pieces_is_converted_once(folder, monkeypatch):
    save_bert(folder)
    converted = Tokenizer.load(folder)
    ids = list(converted.encode("The quick foxes, jump", True))
    pieces = ["[CLS]", "the", "quick", "fox", "##es", ",", "jump", "[SEP]"]
    assert ids == [WORDS.index(piece) for piece in pieces]
    assert converted.decode(ids, True) == "the quick foxes, jump"
    monkeypatch.setattr(subprocess, "run", None)
    assert list(Tokenizer.load(folder).encode("fox", False)) == [WORDS.index("fox")]


def test_a_failed_conversion_is_a_model_error_and_leaves_no_file(folder, cache, monkeypatch):
    def fail(*_args, **_more):
        raise subprocess.CalledProcessError(1, "convert")

    save_bert(folder)
    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(ModelError, match=r"vocab\.txt cannot be converted") as refused:
        tokenizer_file(folder)
    assert refused.value.code == "tokenizer_invalid"
    assert list(cache.iterdir()) == []


def test_a_folder_without_any_vocabulary_is_a_model_error(folder):
    with pytest.raises(ModelError, match=r"no tokenizer: .*; download the model again"):
        tokenizer_file(folder)
