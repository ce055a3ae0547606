from pathlib import Path

from tokenizers import Tokenizer

from headrace_common.checkpoints.spec import read_spec
from tools.harness.drive import generate, tiny_runner
from tools.make_random_model import make_random_model


def test_a_random_model_runs_and_its_tokenizer_covers_its_vocabulary(tmp_path: Path) -> None:
    count = make_random_model(tmp_path, "tiny")
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    spec = read_spec(tmp_path)
    assert count == 320 * 64 * 2 + 64 + 2 * (64 * 128 + 64 * 64 + 3 * 96 * 64 + 2 * 64 + 2 * 16)
    assert tokenizer.get_vocab_size() == spec.vocab_size == 320
    assert spec.end_token_ids == (tokenizer.token_to_id("<|im_end|>"),)
    assert len(generate(tiny_runner(tmp_path), [1, 2, 3], 4, 3)) == 4


def test_a_random_hybrid_runs(tmp_path: Path) -> None:
    count = make_random_model(tmp_path, "tiny-hybrid")
    delta_net = 64 * (192 + 128 + 2 * 4) + 128 * 64 + 192 * 4 + 2 * 4 + 32
    attention = 64 * (2 * 128 + 2 * 64) + 128 * 64 + 2 * 32
    shared = 3 * 96 * 64 + 2 * 64
    assert count == 320 * 64 * 2 + 64 + 3 * delta_net + attention + 4 * shared
    assert len(generate(tiny_runner(tmp_path, "native-text"), [1, 2, 3], 4, 3)) == 4
