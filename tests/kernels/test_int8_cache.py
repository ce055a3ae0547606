"""Compares the kernels of an 8-bit cache with plain torch."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from headrace_kernels import dequantize_rows, quantize_rows
from headrace_kernels.attention import CpuAttention
from headrace_kernels.instruction_sets import InstructionSet
from tests.kernels.attention_case import Case, Memory, make_case, places, reference
from tests.kernels.own_kernels import OWN_SETS

MIXED = [(30, 1), (0, 72), (17, 102), (63, 1), (16, 3), (600, 5), (255, 17)]
DIM = 32


def make_int8_case(size: int = 32, dim: int = DIM, dtype: torch.dtype = torch.float32) -> Case:
    """A case whose earlier positions were written by the kernels. `pasts` returns them."""
    case = make_case(MIXED, (8, 2), dim, dtype=dtype, size=size)
    shape = (*case.memory.keys[0].shape[:3], dim + 4)
    keys, values = torch.zeros(2, *shape, dtype=torch.int8)
    return replace(case, memory=Memory([keys], [values], dtype=dtype))


def rows_of(memory: Tensor, dim: int, is_key: bool) -> Tensor:
    """Return a layer's blocks in the order [blocks, kv_heads, positions, dim + 4]."""
    blocks, heads, size, width = memory.shape
    flat = memory.reshape(blocks, heads, size * width)
    numbers, scales = flat.split((size * dim, size * 4), dim=2)
    down, across = (dim, size) if is_key else (size, dim)
    if size % 16 == 0 and dim % 16 == 0:
        words = numbers.view(blocks, heads, down // 4, across // 16, 4, 16).transpose(3, 4)
    else:
        words = numbers.reshape(blocks, heads, down, across)
    numbers = words.reshape(blocks, heads, down, across)
    rows = numbers.transpose(2, 3) if is_key else numbers
    return torch.cat((rows, scales.view(blocks, heads, size, 4)), dim=3)


def fill(case: Case, attention: CpuAttention) -> tuple[Tensor, Tensor]:
    """Write random positions to all blocks; return what the cache then holds, in float32."""
    blocks, heads, size, width = case.memory.keys[0].shape
    dim, held = width - 4, []
    new = torch.randn(2, blocks * size, heads, dim).to(case.q.dtype)
    everything = make_case([(0, blocks * size)], (heads, heads), dim, size=size, dtype=new.dtype)
    everything.step.block_table[:] = range(blocks)
    attention.step(everything.step).attend(0, new[0], *new)
    for memory, rows in zip((case.memory.keys[0], case.memory.values[0]), new, strict=True):
        expected = quantize_rows(rows).view(blocks, size, heads, width).transpose(1, 2)
        assert torch.equal(rows_of(memory, dim, memory is case.memory.keys[0]), expected)
        held.append(dequantize_rows(expected))
    return held[0], held[1]


def rounded(case: Case) -> Case:
    return replace(
        case, k=dequantize_rows(quantize_rows(case.k)), v=dequantize_rows(quantize_rows(case.v))
    )


@pytest.mark.parametrize("instructions", OWN_SETS)
@pytest.mark.parametrize("size, dim", [(32, 32), (16, 128), (48, 64), (3, 24), (32, 24), (8, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_reads_the_rounded_numbers_of_plain_torch(
    size: int, dim: int, dtype: torch.dtype, instructions: InstructionSet
) -> None:
    case = make_int8_case(size, dim, dtype)
    attention = CpuAttention(case.memory, (None,), (), instructions)
    keys, values = fill(case, attention)
    found = attention.step(case.step).attend(0, case.q, case.k, case.v)
    expected = reference(rounded(case), keys, values)
    assert (found.double() - expected).abs().max() < (1e-5 if dtype == torch.float32 else 0.03)
    stored = rows_of(case.memory.values[0], dim, is_key=False)
    for row, (block, offset) in enumerate(places(case)):
        assert torch.equal(stored[block, :, offset], quantize_rows(case.v[row]))


@pytest.mark.parametrize("window", [1, 20, 300])
def test_windows_sinks_and_caps_act_on_the_rounded_numbers(window: int) -> None:
    case = make_int8_case()
    case.window, case.cap, case.sinks = window, 5.0, torch.linspace(-2, 3, 8)
    case.q.mul_(20)
    attention = CpuAttention(case.memory, (window,), [case.sinks])
    keys, values = fill(case, attention)
    found = attention.step(case.step).attend(0, case.q, case.k, case.v, case.cap)
    assert (found.double() - reference(rounded(case), keys, values)).abs().max() < 2e-5


@pytest.mark.parametrize("size", [8, 32])
def test_unwritten_scales_have_no_influence(size: int) -> None:
    starts = make_case([(0, 1), (0, 5), (0, 33), (0, 6)], (8, 2), DIM, size=size)
    shape = (*starts.memory.keys[0].shape[:3], DIM + 4)
    memory = Memory(*([torch.full(shape, -1, dtype=torch.int8)] for _ in range(2)))
    assert memory.keys[0].view(torch.float32).isnan().all()
    starts = replace(starts, memory=memory)
    attention = CpuAttention(memory, (None,))
    found = attention.step(starts.step).attend(0, starts.q, starts.k, starts.v)
    blank = torch.zeros(2, *shape[:3], DIM)
    assert (found.double() - reference(rounded(starts), *blank)).abs().max() < 1e-5


def test_rows_of_zeros_tiny_numbers_infinities_and_nan() -> None:
    rows = torch.zeros(5, DIM)
    rows[1], rows[2, 3], rows[3, 3], rows[4, 5] = 1e-38, 2.0, float("nan"), float("inf")
    found = dequantize_rows(quantize_rows(rows))
    assert torch.equal(found[:2], torch.zeros(2, DIM))
    torch.testing.assert_close(found[2], rows[2])
    assert found[3].isnan().all() and not found[4].isfinite().any()
    case = make_case([(0, 3), (0, 1), (0, 1)], (1, 1), DIM, size=32)
    keys, values = torch.zeros(2, 6, 1, 32, DIM + 4, dtype=torch.int8)
    attention = CpuAttention(Memory([keys], [values]), (None,))
    out = attention.step(case.step).attend(0, case.q, rows[:, None], rows[:, None])
    assert out[:3].isfinite().all() and out[3:].isnan().all()


def test_the_rounding_error_is_at_most_half_a_step() -> None:
    torch.manual_seed(0)
    x = torch.randn(1000, DIM)
    error = (dequantize_rows(quantize_rows(x)) - x).abs()
    assert (error <= x.abs().amax(-1, keepdim=True) / 254 * 1.001).all()
