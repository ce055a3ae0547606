"""Files beside llama.cpp: as they are, and with their values in float32, where nobody rounds."""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize

from headrace.text.tokenizer import Tokenizer
from headrace_common.checkpoints.find import find_model
from headrace_engine.runner.runner import Runner
from tests.trained.conftest import PROMPTS, TEXT
from tests.trained.llama_cpp import mean_logprob
from tests.trained.test_perplexity import of_runner
from tools.harness.drive import row_logits, tiny_runner
from tools.harness.gguf_files import write_file
from tools.harness.llama_server import drawn, greedy, llama_server

pytestmark = pytest.mark.timeout(1500)  # seconds, on cores that others use too
NUM_TOKENS = 64
ENDS = ("<|im_end|>", "<|endoftext|>", "<eos>", "<end_of_turn>")


class Case(NamedTuple):
    """A file, and the same values in float32."""

    name: str
    file: Path
    unpacked: Path
    text_ids: list[int]


@pytest.fixture(scope="module", params=["smollm2", pytest.param("gemma3", marks=pytest.mark.slow)])
def case(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Case]:
    file: Path = request.getfixturevalue(f"{request.param}_file")
    folder: Path = tmp_path_factory.mktemp("unpacked")
    unpacked = folder / f"{request.param}.gguf"
    unpack(file, unpacked)
    text_ids = list(Tokenizer.load(find_model(str(file))).encode(TEXT.read_text(), True))[:1024]
    yield Case(request.param, file, unpacked, text_ids)
    unpacked.unlink()


@pytest.fixture(scope="module")
def theirs(case: Case, tmp_path_factory: Any) -> tuple[float, float]:
    """llama.cpp's perplexity of the text by the file, and by its values in float32."""
    folder = tmp_path_factory.mktemp("ids")
    by_file, exactly = (
        math.exp(-mean_logprob(file, case.text_ids, folder)) for file in (case.file, case.unpacked)
    )
    return by_file, exactly


@pytest.fixture(scope="module")
def exact(case: Case) -> Runner:
    return tiny_runner(find_model(str(case.unpacked)), dtype="float32", threads=2)


def unpack(source: Path, target: Path) -> None:
    """The same model with all its weights in float32."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            kinds = (field.types[0], field.types[-1] if len(field.types) > 1 else None)
            writer.add_key_value(name, field.contents(), *kinds)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, values.astype(np.float32))
    write_file(writer)


def test_in_float32_a_text_is_as_likely_as_to_llama_cpp(
    case: Case, exact: Runner, theirs: tuple[float, float]
) -> None:
    """llama.cpp keeps its cache in float16, which may part us."""
    share = of_runner(exact, case.text_ids) / theirs[1] - 1
    print(f"{case.name} in float32, llama.cpp {theirs[1]:.4f}: {100 * share:+.4f} %")
    assert abs(share) < 5e-4


@pytest.mark.parametrize("quantize", ["auto", "none"])
def test_a_file_has_llama_cpps_perplexity(
    case: Case, theirs: tuple[float, float], quantize: str
) -> None:
    """As the file has its weights, and unpacked to bfloat16.

    On such a file llama.cpp rounds what goes into a product to 8 bits, which costs it some of
    what it knows; so the text may be likelier to us than to it.
    """
    by_file, exactly = theirs
    ours = of_runner(tiny_runner(find_model(str(case.file)), quantize=quantize), case.text_ids)
    lost, share = ours / exactly - 1, ours / by_file - 1
    print(f"{case.name}, {quantize}: {ours:.4f} ({100 * lost:+.3f} % to float32),", end=" ")
    print(f"llama.cpp {by_file:.4f} ({100 * (by_file / exactly - 1):+.3f} %); {100 * share:+.3f} %")
    assert abs(lost) < 5e-3 and -1e-2 < share < 5e-3


@pytest.mark.slow
def test_in_float32_twenty_texts_part_only_where_two_tokens_are_as_good(
    case: Case, exact: Runner
) -> None:
    tokenizer = Tokenizer.load(find_model(str(case.file)))
    prompts = [list(tokenizer.encode(prompt, True)) for prompt in PROMPTS]
    ends = [ids[0] for ids in (tokenizer.encode(end, False) for end in ENDS) if len(ids) == 1]
    num_same = 0
    with (
        llama_server(case.unpacked, threads=2, streams=4, positions=256) as url,
        ThreadPoolExecutor(4) as pool,
    ):
        texts = pool.map(lambda prompt: greedy(url, prompt, NUM_TOKENS), prompts)
        for words, prompt, text in zip(PROMPTS, prompts, texts, strict=True):
            # our text is the same up to the first place where another token is our best
            shares = row_logits(exact, prompt + text[:-1])[len(prompt) - 1 :].log_softmax(-1)
            shares[:, ends] = -math.inf  # a text goes on behind them
            best = shares.argmax(-1).tolist()
            if best == text:
                num_same += 1
                continue
            place = next(n for n in range(NUM_TOKENS) if best[n] != text[n])
            row = drawn(url, prompt + text[:place], n_probs=8)["top_logprobs"]
            theirs = {one["id"]: one["logprob"] for one in row}
            gap = float(shares[place, best[place]] - shares[place, text[place]])
            their_gap = theirs[text[place]] - theirs.get(best[place], -math.inf)
            print(f"{words!r} parts at {place}: {gap:.4f} nat, {their_gap:.4f} by llama.cpp")
            assert max(gap, their_gap) < 0.1
    print(case.name, "same to the end:", num_same, "of", len(PROMPTS))
    assert num_same >= len(PROMPTS) - 4
