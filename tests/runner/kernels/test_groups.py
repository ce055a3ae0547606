"""Weights in groups: their products are right, and no row changes another."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from headrace.checkpoints.gguf_groups import (
    GROUP_SCHEMES,
    Groups,
    GroupScheme,
    common_scheme,
    read_groups,
)
from headrace.runner.kernels.groups import pack_groups, packed_bytes, quantize_groups
from headrace.runner.kernels.linear import GroupedLinear
from tests.runner.kernels.own_kernels import OWN_SETS, needs_own_kernels
from tools.harness.gguf_files import encoded

ALL = [
    GroupScheme(4, 32, True),
    GroupScheme(8, 32, False),
    GroupScheme(8, 32, True),
    GroupScheme(8, 16, False),
    GroupScheme(8, 16, True),
]


def make(form: GroupScheme, outputs: int, inputs: int) -> Groups:
    generator = torch.Generator().manual_seed(0)
    low, high = (0, 16) if form.bits == 4 else (-128, 128)
    q = torch.randint(low, high, (outputs, inputs), generator=generator).to(torch.int8)
    size = outputs, -(-inputs // form.size)
    scale = torch.randn(size, generator=generator).half()
    minimum = torch.randn(size, generator=generator).half() * (9 if form.has_minimum else 0)
    return Groups(form, q, scale, minimum)


def values(groups: Groups) -> Tensor:
    """float64 [outputs, inputs]."""
    own = torch.arange(groups.q.shape[1]) // groups.scheme.size
    return groups.q.double() * groups.scale.double()[:, own] + groups.minimum.double()[:, own]


@needs_own_kernels
@pytest.mark.parametrize("form", ALL)
@pytest.mark.parametrize("outputs, inputs", [(67, 96), (130, 1024), (12, 37), (1, 7), (40, 16)])
def test_the_product_is_that_of_the_values(form: GroupScheme, outputs: int, inputs: int) -> None:
    torch.manual_seed(0)
    groups, bias = make(form, outputs, inputs), torch.randn(outputs)
    layer = GroupedLinear(groups, bias)
    assert layer.weight.nbytes == packed_bytes(form, outputs, inputs)
    for rows in (1, 2, 3, 5, 9, 13, 30, 150):
        x = torch.randn(rows, inputs)
        for given, tolerance in ((x, 1e-4), (x.bfloat16(), 3e-3)):
            if form.bits == 8 and given.dtype == torch.float32:
                continue  # no model needs it
            expected = given.double() @ values(groups).T + bias.double()
            error = (layer(given).double() - expected).norm() / expected.norm()
            assert error < tolerance


@needs_own_kernels
@pytest.mark.parametrize(
    "form, dtype", [*((form, torch.bfloat16) for form in ALL), (ALL[0], torch.float32)]
)
def test_a_row_is_the_same_whatever_rows_are_with_it(form: GroupScheme, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = GroupedLinear(make(form, 100, 3104), None)
    x = torch.randn(220, 3104).to(dtype)
    whole = layer(x)  # more than one block of rows
    parts = [*((row, row + 1) for row in range(14)), (1, 3), (3, 7), (10, 27), (30, 43), (180, 213)]
    for first, stop in parts:
        assert torch.equal(layer(x[first:stop]), whole[first:stop])


@needs_own_kernels
@pytest.mark.parametrize("groups", ALL)
def test_an_instruction_set_computes_what_plain_vectors_do(groups: GroupScheme) -> None:
    torch.manual_seed(0)
    made, bias = make(groups, 70, 1024), torch.randn(70)
    x = (torch.randn(50, 1024) * torch.logspace(-3, 1, 1024)).bfloat16()
    best, vectors = (GroupedLinear(made, bias, OWN_SETS[n])(x) for n in (0, -1))
    assert torch.equal(best, vectors)


@needs_own_kernels
def test_rows_of_zeros_and_the_largest_sums_are_right() -> None:
    q = torch.full((32, 64), -128, dtype=torch.int8)
    scale, none = torch.ones(32, 2).half(), torch.zeros(32, 2).half()
    layer = GroupedLinear(Groups(GroupScheme(8, 32, False), q, scale, none), None)
    assert torch.equal(layer(torch.zeros(1, 64).bfloat16()), torch.zeros(1, 32).bfloat16())
    assert torch.equal(
        layer(torch.ones(1, 64).bfloat16()).float(), torch.full((1, 32), -128.0 * 64)
    )


@pytest.mark.parametrize("kind", GROUP_SCHEMES)
def test_groups_of_a_file_are_its_values(kind: str) -> None:
    given = np.random.default_rng(0).normal(size=(8, 512)).astype(np.float32)
    raw = encoded(given, kind, "any")
    q, scale, minimum = read_groups(raw, kind)
    size, bits = GROUP_SCHEMES[kind].size, GROUP_SCHEMES[kind].bits
    exact = dequantize(raw, GGMLQuantizationType[kind])
    assert (q == np.rint(q)).all() and q.min() >= (0 if bits == 4 else -128) and q.max() <= 127
    assert bits == 8 or q.max() <= 15
    assert GROUP_SCHEMES[kind].has_minimum or not minimum.any()
    assert np.array_equal(scale.repeat(size, 1) * q + minimum.repeat(size, 1), exact)
    scale, minimum = (part.astype(np.float16).astype(np.float32) for part in (scale, minimum))
    kept = scale.repeat(size, 1) * q + minimum.repeat(size, 1)
    in_bfloat16 = torch.from_numpy(exact).bfloat16().float().numpy()
    assert np.linalg.norm(kept - exact) <= 0.2 * np.linalg.norm(in_bfloat16 - exact)


def test_a_stack_takes_what_holds_all_its_types() -> None:
    assert common_scheme(["Q4_K", "Q4_0"]) == GroupScheme(4, 32, True)
    assert common_scheme(["Q4_K", "Q6_K"]) == GroupScheme(8, 16, True)
    assert common_scheme(["Q8_0", "Q6_K"]) == GroupScheme(8, 16, False)
    assert common_scheme(["Q8_0", "BF16"]) is None and common_scheme([]) is None


@pytest.mark.parametrize("inputs", [32, 100, 1024])
def test_rounding_to_4_bits_is_within_half_a_step_of_each_group(inputs: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(70, inputs) * torch.logspace(-3, 0, inputs)
    groups = quantize_groups(weight)
    assert groups.q.min() >= 0 and groups.q.max() <= 15
    own = torch.arange(inputs) // 32
    step = groups.scale.double()[:, own]
    assert ((values(groups) - weight).abs() <= 0.51 * step + 1e-6).all()
    error = (values(groups) - weight).norm() / weight.norm()
    assert 0.01 < error < 0.15


def test_packing_keeps_panels_apart_from_each_other() -> None:
    form = GroupScheme(4, 32, True)
    groups = make(form, 64, 64)
    both = pack_groups(groups)
    for panel in range(2):
        own = Groups(form, *(part[32 * panel : 32 * panel + 32] for part in groups[1:]))
        assert torch.equal(pack_groups(own)[0], both[panel])
