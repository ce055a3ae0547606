import json
import subprocess
import sys

import pytest

from headrace.text.tokenizer import Tokenizer
from headrace_common.checkpoints.convert_tokenizer import main
from tools.harness.small_tokenizers import CORPUS, library


def convert(folder) -> Tokenizer:
    main(folder, folder / "out.json")
    return Tokenizer((folder / "out.json").read_bytes())


def test_a_list_of_word_pieces_is_converted(tmp_path):
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nfox\n##es")
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    assert list(convert(tmp_path).encode("Foxes", True)) == [2, 5, 6, 3]


def test_a_folder_with_a_device_in_a_texts_place_is_refused_before_the_library_reads_it(tmp_path):
    (tmp_path / "vocab.txt").write_text("[UNK]")
    (tmp_path / "special_tokens_map.json").symlink_to("/dev/zero")
    with pytest.raises(OSError, match="not a regular file"):
        convert(tmp_path)


def test_a_vocabulary_with_merges_is_converted(tmp_path):
    model = json.loads(library("gpt2").to_str())["model"]
    merges = "\n".join(" ".join(merge) for merge in model["merges"])
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + merges)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    converted = convert(tmp_path)
    for text in CORPUS:
        assert list(converted.encode(text, True)) == library("gpt2").encode(text).ids


@pytest.mark.parametrize(("limit", "is_converted"), [(", 64 << 20", False), ("", True)])
def test_a_conversion_ends_at_its_limit_on_memory(tmp_path, limit, is_converted):
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nfox\n##es")
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    code = (
        "import sys; from pathlib import Path; "
        "from headrace_common.checkpoints.convert_tokenizer import run; "
        f"run(Path(sys.argv[1]), Path(sys.argv[2]){limit})"
    )
    command = [sys.executable, "-c", code, str(tmp_path), str(tmp_path / "out.json")]
    ended = subprocess.run(command, stderr=subprocess.DEVNULL, timeout=100)
    assert (ended.returncode == 0) == is_converted
    assert (tmp_path / "out.json").exists() == is_converted
