import logging
from typing import Any

import pytest
import torch

from headrace_kernels import attention, choose, instruction_sets, quantize_rows, registers
from headrace_kernels.choose import choose_instructions
from headrace_kernels.instruction_sets import INSTRUCTION_SETS, instruction_sets_here
from headrace_kernels.linear import Quantize
from tests.kernels.own_kernels import OWN_SETS, needs_own_kernels

STATES = frozenset({"convolution"})


@pytest.fixture(autouse=True)
def checked_anew() -> None:
    choose._fault.cache_clear()


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that fakes a processor's LLVM features and returns its instruction sets."""

    def have(*names: str, has_amx: bool = False) -> tuple[str, ...]:
        monkeypatch.setattr(instruction_sets, "features", lambda: set(names))
        monkeypatch.setattr(instruction_sets, "has_amx", lambda: has_amx)
        return instruction_sets_here.__wrapped__()

    return have


def test_the_processors_features_decide_its_instruction_sets(processor: Any) -> None:
    wide = ("avx2", "fma", "avx512f", "avx512bw")
    assert processor() == ("plain",)
    assert processor("avx2") == ("plain",)
    assert processor("avx2", "fma") == ("plain",)
    assert processor("avx2", "fma", "f16c") == ("avx2", "plain")
    assert processor(*wide) == ("avx512", "plain")
    assert processor(*wide, "avx512bf16") == ("bf16dot", "avx512", "plain")
    assert processor(*wide, "avx512bf16", has_amx=True) == (*INSTRUCTION_SETS[:3], "plain")
    assert processor("neon", "fp-armv8") == ("neon", "plain")


def test_numbas_own_variable_limits_the_instruction_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registers.config, "CPU_FEATURES", "+avx2,+fma,+f16c,-avx512f")
    assert instruction_sets_here.__wrapped__() == ("avx2", "plain")


@needs_own_kernels
@pytest.mark.parametrize("instructions", OWN_SETS)
@pytest.mark.parametrize("quantize", ["none", "int8", "int4"])
def test_every_instruction_set_of_this_machine_passes_its_check(
    instructions: str, quantize: Quantize
) -> None:
    for has_int8_cache in (False, True):
        assert choose_instructions(
            instructions,
            torch.bfloat16,
            quantize,
            kinds=STATES,
            has_int8_cache=has_int8_cache,
        ) == (instructions, "as asked")


@needs_own_kernels
def test_the_kernels_of_an_int8_cache_are_checked_for_models_that_have_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(choose, "quantize_rows", lambda x: quantize_rows(1.1 * x))
    best = instruction_sets_here()[0]
    assert choose_instructions("auto", torch.bfloat16).instructions == best
    found = choose_instructions("auto", torch.bfloat16, has_int8_cache=True)
    assert found.instructions == "plain"


@needs_own_kernels
def test_the_best_instruction_set_is_chosen_and_logged() -> None:
    found = choose_instructions("auto", torch.bfloat16)
    assert found.instructions == instruction_sets_here()[0]
    assert found.reason.startswith("the processor has ")


def test_float32_uses_only_kernels_that_support_it() -> None:
    found = choose_instructions("auto", torch.float32).instructions
    assert found in ("avx512", "avx2", "neon", "plain")
    with pytest.raises(ValueError, match=r"--kernels bf16dot cannot compute float32.* plain\."):
        choose_instructions("bf16dot", torch.float32)


def break_kernels(instructions: str, monkeypatch: pytest.MonkeyPatch, result: Any) -> None:
    kernels_for = choose.CpuAttention.step

    def step(self: Any, batch: Any) -> Any:
        if self.instructions != instructions:
            return kernels_for(self, batch)
        if isinstance(result, Exception):
            raise result
        made = kernels_for(self, batch)
        attend = made.attend
        made.attend = lambda *args: attend(*args).mul_(result)
        return made

    monkeypatch.setattr(choose.CpuAttention, "step", step)


@needs_own_kernels
@pytest.mark.parametrize("fault", [1.1, float("nan"), RuntimeError("no such instruction")])
def test_an_instruction_set_that_fails_its_check_is_not_used(
    fault: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = instruction_sets_here()[:2]
    break_kernels(first, monkeypatch, fault)
    with caplog.at_level(logging.WARNING):
        found = choose_instructions("auto", torch.bfloat16)
    assert found == (second, f"{first} failed its check")
    (warning,) = caplog.records
    assert f"The kernels for {first} are not used" in warning.getMessage()


@needs_own_kernels
@pytest.mark.parametrize("what", ["convolve", "delta_rule"])
def test_states_are_checked_for_models_that_have_them(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = getattr(attention.CpuStep, what)
    monkeypatch.setattr(attention.CpuStep, what, lambda *args: compute(*args) * 1.1)
    assert choose_instructions("auto", torch.bfloat16).instructions == instruction_sets_here()[0]
    assert choose_instructions("auto", torch.bfloat16, kinds=STATES).instructions == "plain"


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_plain_kernels_refuse_to_quantize_and_name_the_remedy(quantize: Quantize) -> None:
    with pytest.raises(ValueError, match=f"{quantize} .* Use --quantize none"):
        choose_instructions("plain", torch.bfloat16, quantize)
