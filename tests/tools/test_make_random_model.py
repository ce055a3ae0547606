from pathlib import Path

from tokenizers import Tokenizer

from headrace.checkpoints.spec import read_spec
from tests.drive import generate, tiny_runner
from tools.make_random_model import make_random_model


def test_a_random_model_runs_and_its_tokenizer_covers_its_vocabulary(tmp_path: Path) -> None:
    count = make_random_model(tmp_path, "tiny")
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    spec = read_spec(tmp_path)
    assert count == 320 * 64 * 2 + 64 + 2 * (64 * 128 + 64 * 64 + 3 * 96 * 64 + 2 * 64 + 2 * 16)
    assert tokenizer.get_vocab_size() == spec.vocab_size == 320
    assert spec.end_token_ids == (tokenizer.token_to_id("<|im_end|>"),)
    assert len(generate(tiny_runner(tmp_path), [1, 2, 3], 4, 3)) == 4
