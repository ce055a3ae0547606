"""Every instruction set of the kernels that this machine has: batched = alone, chunked = whole."""

from pathlib import Path

import pytest
import torch

from headrace_common.messages import InstructionSet
from headrace_engine.runner.runner import Runner
from tests.kernels.own_kernels import ALL_SETS, HAS_OWN, OWN_SETS, needs_own_kernels
from tools.harness.drive import assert_close, logits_of, random_prompt, row_logits, tiny_runner
from tools.harness.tiny_models import make_tiny_model

PROMPTS = [random_prompt(length) for length in (300, 7, 41, 130)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kernels")
    return make_tiny_model(folder, head_dim=32, initializer_range=0.1)  # as AMX needs it


@pytest.fixture(scope="module", params=[*ALL_SETS, "int4", "int8 cache"])
def runner(request: pytest.FixtureRequest, folder: Path) -> Runner:
    if request.param == "int4":
        if not HAS_OWN:
            pytest.skip("this processor runs no kernels but torch's")
        return tiny_runner(folder, quantize="int4", dtype="bfloat16", block_size=32)
    if request.param == "int8 cache":
        return tiny_runner(folder, kv_cache_dtype="int8", dtype="bfloat16", block_size=32)
    return tiny_runner(folder, kernels=request.param, dtype="bfloat16", block_size=32)


def agree(runner: Runner, found: torch.Tensor, expected: torch.Tensor) -> bool:
    """To the bit; torch's own products round differently for another number of rows."""
    if runner.lane._instructions == "plain":
        assert_close(found, expected, tolerance=0.05)
        return True
    return torch.equal(found, expected)


@pytest.mark.parametrize("chunk", [1, 5, 32, 64, 99, 257])
def test_chunked_is_whole(runner: Runner, chunk: int) -> None:
    prompt = PROMPTS[0] if chunk > 5 else PROMPTS[0][:80]
    assert agree(runner, row_logits(runner, prompt, chunk), row_logits(runner, prompt))


def test_batched_is_alone(runner: Runner) -> None:
    for prompt, part in zip(PROMPTS, logits_of(runner, PROMPTS), strict=True):
        assert agree(runner, part, row_logits(runner, prompt))


@needs_own_kernels
@pytest.mark.parametrize("instructions", OWN_SETS)
def test_every_instruction_set_is_close_to_plain(
    folder: Path, instructions: InstructionSet
) -> None:
    plain, own = (
        row_logits(tiny_runner(folder, kernels=kernels, dtype="bfloat16"), PROMPTS[0])
        for kernels in ("plain", instructions)
    )
    assert_close(own, plain, tolerance=0.05)


@needs_own_kernels
@pytest.mark.parametrize("instructions", OWN_SETS)
def test_an_int8_cache_is_close_to_that_of_plain(
    folder: Path, instructions: InstructionSet
) -> None:
    plain, own = (
        row_logits(
            tiny_runner(folder, kernels=kernels, dtype="float32", kv_cache_dtype="int8"), PROMPTS[0]
        )
        for kernels in ("plain", "auto" if instructions in ("amx", "bf16dot") else instructions)
    )
    assert_close(own, plain, tolerance=5e-3)
