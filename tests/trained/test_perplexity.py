"""The perplexity of a text by each lane and form of the weights, beside the originals' own."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.checkpoints.find import find_model
from headrace.runner.runner import Runner
from headrace.text.tokenizer import Tokenizer
from tests.drive import row_logits, tiny_runner
from tests.trained.conftest import TEXT
from tests.trained.llama_cpp import mean_logprob


def perplexity(logits: torch.Tensor, token_ids: list[int]) -> float:
    """The perplexity of every token but the first."""
    found = logits[:-1].double().log_softmax(dim=-1)
    return math.exp(-float(found[range(len(found)), token_ids[1:]].mean()))


def of_runner(runner: Runner, token_ids: list[int]) -> float:
    """In chunks, as a server would read it."""
    return perplexity(row_logits(runner, token_ids, chunk=256), token_ids)


@pytest.fixture(scope="module")
@torch.inference_mode()
def exact(smollm2_reference: Any, text_ids: list[int]) -> float:
    """By transformers in float32."""
    found = perplexity(smollm2_reference(torch.tensor([text_ids])).logits[0], text_ids)
    print(f"transformers float32: {found:.4f}")
    return found


CASES = {
    "native float32": ("native-text", "float32", "none", 1e-4),
    "generic float32": ("generic-text", "float32", "none", 1e-4),
    "native bfloat16": ("native-text", "bfloat16", "none", 0.01),
    "generic bfloat16": ("generic-text", "bfloat16", "none", 0.01),
    "native int8": ("native-text", "bfloat16", "int8", 0.01),
    "native int4": ("native-text", "bfloat16", "int4", 0.01),
}
"""Lane, number format, form of the weights, and the share by which the text may be less likely."""


@pytest.mark.parametrize("case", CASES)
def test_a_folder_has_transformers_perplexity(
    smollm2: Path, exact: float, text_ids: list[int], case: str
) -> None:
    lane, dtype, quantize, bound = CASES[case]
    found = of_runner(tiny_runner(smollm2, lane, dtype=dtype, quantize=quantize), text_ids)
    print(f"{case}: {found:.4f} ({100 * (found / exact - 1):+.3f} %)")
    assert abs(found / exact - 1) < bound


@pytest.mark.parametrize("quantize", ["auto", "none"])
@pytest.mark.parametrize("model", ["smollm2", "gemma3"])
def test_a_file_has_llama_cpps_perplexity(
    request: pytest.FixtureRequest, tmp_path: Path, model: str, quantize: str
) -> None:
    """As the file has its weights, and unpacked.

    llama.cpp rounds what goes into a product to 8 bits, so the text may be likelier to us.
    """
    file: Path = request.getfixturevalue(f"{model}_file")
    folder = find_model(str(file))
    text_ids = list(Tokenizer.load(folder).encode(TEXT.read_text(), True))[:512]
    theirs = math.exp(-mean_logprob(file, text_ids, tmp_path))
    ours = of_runner(tiny_runner(folder, quantize=quantize), text_ids)
    share = ours / theirs - 1
    print(f"{model}, {quantize}: {ours:.4f}, llama.cpp {theirs:.4f} ({100 * share:+.3f} %)")
    assert -0.01 < share < 5e-3
