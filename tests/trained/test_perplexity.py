"""The perplexity of a text by each lane and form of the weights, beside transformers' own."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from headrace_engine.runner.runner import Runner
from tools.harness.drive import row_logits, tiny_runner


def perplexity(logits: torch.Tensor, token_ids: list[int]) -> float:
    """The perplexity of every token but the first."""
    parts = zip(logits[:-1].split(64), torch.tensor(token_ids[1:]).split(64), strict=True)
    lost = sum(cross_entropy(rows.double(), ids, reduction="sum") for rows, ids in parts)
    return math.exp(float(lost) / (len(token_ids) - 1))


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cache_in_8_bits_changes_the_perplexity_by_at_most_a_fifth_of_a_percent(
    smollm2: Path, text_ids: list[int], dtype: str
) -> None:
    exact, rounded = (
        of_runner(tiny_runner(smollm2, dtype=dtype, kv_cache_dtype=kind), text_ids)
        for kind in ("auto", "int8")
    )
    print(f"{dtype}: {exact:.4f}, with an int8 cache {rounded:.4f}")
    assert 0 < abs(rounded / exact - 1) < 2e-3
