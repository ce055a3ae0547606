"""Files beside llama.cpp: as they are, and with their values in float32, where nobody rounds."""

import math
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from torch.nn.functional import kl_div

from headrace.text.tokenizer import Tokenizer
from headrace_common.checkpoints.find import find_model
from headrace_engine.runner.runner import Runner
from tests.trained.conftest import PROMPTS, TEXTS
from tests.trained.llama_cpp import llama_logits
from tests.trained.test_perplexity import of_runner, perplexity
from tools.harness.drive import row_logits, tiny_runner
from tools.harness.gguf_files import write_file
from tools.harness.llama_server import drawn, greedy, llama_server

pytestmark = pytest.mark.timeout(1500)  # seconds, on cores that others use too
NUM_TOKENS = 64
NEAR = 0.1  # logits: the best two tokens are about as good
ENDS = ("<|im_end|>", "<|endoftext|>", "<eos>", "<end_of_turn>")


class Case(NamedTuple):
    """A file, and the same values in float32."""

    name: str
    file: Path
    unpacked: Path
    texts: dict[str, list[int]]

    @property
    def text_ids(self) -> list[int]:
        return self.texts["prose"]


class Theirs(NamedTuple):
    """llama.cpp's logits of a text, [tokens, vocab]."""

    by_file: torch.Tensor
    exactly: torch.Tensor  # in float32


class Agreement(NamedTuple):
    """How far two models agree at the same positions.

    `num_close` counts the positions whose best tokens differ, but both models' logits of these two
    tokens differ by less than NEAR. `divergence` is Kullback and Leibler's, in nats, summed.
    """

    num: int = 0
    num_same: int = 0
    num_close: int = 0
    divergence: float = 0.0

    def __str__(self) -> str:
        shares = (self.num_same / self.num, (self.num_same + self.num_close) / self.num)
        same, with_close = (f"{100 * share:.2f} %" for share in shares)
        mean = self.divergence / self.num
        return f"{self.num_same} of {self.num} ({same}; {with_close} with ties), {mean:.2e} nat"

    def plus(self, ours: torch.Tensor, exact: torch.Tensor) -> "Agreement":
        """Add the positions of a text, [tokens, vocab]; the divergence is that from `exact`."""
        num, num_same, num_close, divergence = self
        for rows, expected in zip(ours.split(64), exact.split(64), strict=True):
            best = torch.stack((rows.argmax(-1), expected.argmax(-1)), 1)
            gaps = torch.stack((rows.gather(1, best), expected.gather(1, best))).diff().abs()
            is_same = best[:, 0] == best[:, 1]
            num += len(rows)
            num_same += int(is_same.sum())
            num_close += int((~is_same & (gaps.amax(0)[:, 0] < NEAR)).sum())
            logs = (part.double().log_softmax(-1) for part in (rows, expected))
            divergence += float(kl_div(*logs, reduction="sum", log_target=True))
        return Agreement(num, num_same, num_close, divergence)


@pytest.fixture(scope="module", params=["smollm2", pytest.param("gemma3", marks=pytest.mark.slow)])
def case(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Iterator[Case]:
    file: Path = request.getfixturevalue(f"{request.param}_file")
    folder: Path = tmp_path_factory.mktemp("unpacked")
    unpacked = folder / f"{request.param}.gguf"
    unpack(file, unpacked)
    tokenizer = Tokenizer.load(find_model(str(file)))
    texts = {
        name: list(tokenizer.encode(path.read_text(), True))[:1024] for name, path in TEXTS.items()
    }
    yield Case(request.param, file, unpacked, texts)
    unpacked.unlink()


@pytest.fixture(scope="module")
def theirs(case: Case, tmp_path_factory: Any) -> Iterator[Callable[[str], Theirs]]:
    """Yield a function that returns llama.cpp's logits of a text, given its name."""
    folder: Path = tmp_path_factory.mktemp("logits")

    @cache
    def logits_of(text: str) -> Theirs:
        files = {"file": case.file, "exactly": case.unpacked}
        logits = (
            llama_logits(file, case.texts[text], folder / f"{text}-{name}.npy")
            for name, file in files.items()
        )
        return Theirs(*map(torch.from_numpy, logits))

    yield logits_of
    shutil.rmtree(folder)


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
    case: Case, exact: Runner, theirs: Callable[[str], Theirs]
) -> None:
    """llama.cpp keeps its cache in float16, which may part us."""
    expected = perplexity(theirs("prose").exactly, case.text_ids)
    share = of_runner(exact, case.text_ids) / expected - 1
    print(f"{case.name} in float32, llama.cpp {expected:.4f}: {100 * share:+.4f} %")
    assert abs(share) < 5e-4


@pytest.mark.parametrize("quantize", ["auto", "none"])
def test_a_file_has_llama_cpps_perplexity(
    case: Case, theirs: Callable[[str], Theirs], quantize: str
) -> None:
    """As the file has its weights, and unpacked to bfloat16.

    On such a file llama.cpp rounds what goes into a product to 8 bits, which costs it some of
    what it knows; so the text may be likelier to us than to it.
    """
    by_file, exactly = (perplexity(logits, case.text_ids) for logits in theirs("prose"))
    ours = of_runner(tiny_runner(find_model(str(case.file)), quantize=quantize), case.text_ids)
    lost, share = ours / exactly - 1, ours / by_file - 1
    print(f"{case.name}, {quantize}: {ours:.4f} ({100 * lost:+.3f} % to float32),", end=" ")
    print(f"llama.cpp {by_file:.4f} ({100 * (by_file / exactly - 1):+.3f} %); {100 * share:+.3f} %")
    assert abs(lost) < 5e-3 and -1e-2 < share < 5e-3


@pytest.mark.slow
def test_the_best_token_is_llama_cpps(
    case: Case, exact: Runner, theirs: Callable[[str], Theirs]
) -> None:
    """Compare best tokens in float32, and print how often those of the file are the same."""
    by_file = tiny_runner(find_model(str(case.file)), threads=2)
    float32 = files = ours = others = Agreement()
    for text, ids in case.texts.items():
        rounded, exactly = (row_logits(runner, ids, 256) for runner in (by_file, exact))
        float32 = float32.plus(exactly, theirs(text).exactly)
        files = files.plus(rounded, theirs(text).by_file)
        ours = ours.plus(rounded, theirs(text).exactly)
        others = others.plus(theirs(text).by_file, theirs(text).exactly)
        print(f"{case.name}, up to {text}: both in float32 {float32}; both with the file {files};")
        print(f"the file to float32: Headrace {ours}; llama.cpp {others}")
    assert float32.num > 1000 and float32.num_same >= 0.99 * float32.num


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
