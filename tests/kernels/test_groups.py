"""Tests products with weights that are quantized in groups."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from torch import Tensor

from headrace_kernels.fp4 import _HAS_TABLES, TWICE, doubled
from headrace_kernels.groups import (
    INT4,
    MXFP4,
    GroupedWeights,
    Scheme,
    pack_groups,
    packed_bytes,
    quantize_groups,
)
from headrace_kernels.linear import GroupedLinear
from headrace_kernels.tiles import SHORTS, Matrix, load
from tests.kernels.own_kernels import OWN_SETS, needs_own_kernels

ALL = [
    Scheme(4, 32, True),
    Scheme(8, 32, False),
    Scheme(8, 32, True),
    Scheme(8, 16, False),
    Scheme(8, 16, True),
    MXFP4,
]


def make(scheme: Scheme, outputs: int, inputs: int) -> GroupedWeights:
    generator = torch.Generator().manual_seed(0)
    low, high = (0, 16) if scheme.bits == 4 else (-128, 128)
    q = torch.randint(low, high, (outputs, inputs), generator=generator).to(torch.int8)
    size = outputs, -(-inputs // scheme.size)
    if scheme.is_float:
        powers = torch.randint(116, 132, size, generator=generator).to(torch.uint8)
        return GroupedWeights(scheme, q, powers, powers[:, :0])
    scale = torch.randn(size, generator=generator).half()
    minimum = torch.randn(size, generator=generator).half() * (9 if scheme.has_minimum else 0)
    return GroupedWeights(scheme, q, scale, minimum)


def values(groups: GroupedWeights) -> Tensor:
    """Return the weights as float64 [outputs, inputs]."""
    own = torch.arange(groups.q.shape[1]) // groups.scheme.size
    if groups.scheme.is_float:
        doubled = torch.tensor(TWICE, dtype=torch.float64)[groups.q.long()]
        return doubled * (groups.scale.double() - 128).exp2()[:, own]
    return groups.q.double() * groups.scale.double()[:, own] + groups.minimum.double()[:, own]


def as_multiplied(x: Tensor, scheme: Scheme) -> Tensor:
    """Return rows as the kernels round them: to 255 steps a group if the rows become bytes."""
    if not scheme.form.has_byte_rows:
        return x.double()
    groups = F.pad(x.float(), (0, -x.shape[1] % scheme.size)).unflatten(1, (-1, scheme.size))
    largest = groups.abs().amax(2, keepdim=True)
    steps = (groups * (127 / largest)).round()
    return (steps.double() * (largest / 127).double()).flatten(1)[:, : x.shape[1]]


def _spell(has_tables: bool) -> Any:
    """Return a function that writes `doubled` of its first argument into its second."""

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        given, made = (Matrix(context, builder, signature.args[n], args[n]) for n in range(2))
        codes = load(builder, given.base, ir.VectorType(ir.IntType(8), SHORTS), 1)
        place = builder.inttoptr(made.base, codes.type.as_pointer())
        builder.store(doubled(builder, codes, has_tables), place, align=1)
        return context.get_dummy_value()

    spell: Any = intrinsic(lambda typing, given, made: (types.void(given, made), emit))
    return njit(lambda given, made: spell(given, made))


@needs_own_kernels
@pytest.mark.parametrize("scheme", ALL)
@pytest.mark.parametrize("outputs, inputs", [(67, 96), (130, 1024), (12, 37), (1, 7), (40, 16)])
def test_products_use_the_values_of_the_weights(scheme: Scheme, outputs: int, inputs: int) -> None:
    torch.manual_seed(0)
    groups, bias = make(scheme, outputs, inputs), torch.randn(outputs)
    layer = GroupedLinear(groups, bias)
    assert layer.weight.nbytes == packed_bytes(scheme, outputs, inputs)
    for rows in (1, 2, 3, 5, 9, 13, 30, 150):
        x = torch.randn(rows, inputs)
        for given, tolerance in ((x, 1e-4), (x.bfloat16(), 3e-3)):
            if scheme != INT4 and given.dtype == torch.float32:
                continue  # no model needs this combination
            expected = as_multiplied(given, scheme) @ values(groups).T + bias.double()
            error = (layer(given).double() - expected).norm() / expected.norm()
            assert error < tolerance


@needs_own_kernels
@pytest.mark.parametrize(
    "scheme, dtype", [*((scheme, torch.bfloat16) for scheme in ALL), (ALL[0], torch.float32)]
)
def test_a_row_does_not_depend_on_other_rows(scheme: Scheme, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = GroupedLinear(make(scheme, 100, 3104), None)
    x = torch.randn(220, 3104).to(dtype)
    whole = layer(x)  # several blocks of rows
    parts = [*((row, row + 1) for row in range(14)), (1, 3), (3, 7), (10, 27), (30, 43), (180, 213)]
    for first, stop in parts:
        assert torch.equal(layer(x[first:stop]), whole[first:stop])


@needs_own_kernels
@pytest.mark.parametrize("groups", ALL)
def test_each_instruction_set_computes_the_same_as_plain_vectors(groups: Scheme) -> None:
    torch.manual_seed(0)
    made, bias = make(groups, 70, 1024), torch.randn(70)
    x = (torch.randn(50, 1024) * torch.logspace(-3, 1, 1024)).bfloat16()
    best, vectors = (GroupedLinear(made, bias, OWN_SETS[n])(x) for n in (0, -1))
    assert torch.equal(best, vectors)


@needs_own_kernels
def test_rounding_errors_are_small_and_the_largest_sums_do_not_overflow() -> None:
    torch.manual_seed(0)
    x = torch.randn(20, 1024)
    error = (as_multiplied(x, INT4) - x.double()).norm() / x.norm()
    assert error < 0.01
    q = torch.full((32, 64), 15, dtype=torch.int8)
    scale, none = torch.ones(32, 2).half(), torch.zeros(32, 2).half()
    layer = GroupedLinear(GroupedWeights(INT4, q, scale, none), None)
    for rows in (1, 2, 3, 6):
        for sign in (1, -1):
            found = layer(torch.full((rows, 64), sign * 1.0))
            assert torch.allclose(found, torch.full((rows, 32), sign * 15.0 * 64))


@needs_own_kernels
def test_zeros_and_the_largest_sums_are_right() -> None:
    q = torch.full((32, 64), -128, dtype=torch.int8)
    scale, none = torch.ones(32, 2).half(), torch.zeros(32, 2).half()
    layer = GroupedLinear(GroupedWeights(Scheme(8, 32, False), q, scale, none), None)
    assert torch.equal(layer(torch.zeros(1, 64).bfloat16()), torch.zeros(1, 32).bfloat16())
    assert torch.equal(
        layer(torch.ones(1, 64).bfloat16()).float(), torch.full((1, 32), -128.0 * 64)
    )


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


def test_panels_are_packed_separately() -> None:
    scheme = Scheme(4, 32, True)
    groups = make(scheme, 64, 64)
    both = pack_groups(groups)
    for panel in range(2):
        own = GroupedWeights(scheme, *(part[32 * panel : 32 * panel + 32] for part in groups[1:]))
        assert torch.equal(pack_groups(own)[0], both[panel])


@needs_own_kernels
def test_each_code_has_its_value_with_every_scale() -> None:
    """One input of each row is 1, so the outputs are weights, also with tiny scales."""
    q = torch.arange(16, dtype=torch.int8).repeat(255, 2)
    powers = torch.arange(255).to(torch.uint8)[:, None]
    groups = GroupedWeights(MXFP4, q, powers, powers[:, :0])
    layer = GroupedLinear(groups, None)
    found = layer(torch.eye(32).bfloat16()).T.float()
    assert torch.equal(found, values(groups).bfloat16().float())


@pytest.mark.parametrize("has_tables", [False, True])
def test_unpacking_with_and_without_tables_is_the_same(has_tables: bool) -> None:
    if has_tables and not _HAS_TABLES:
        pytest.skip("this processor has no tables")
    made = np.zeros(32, np.int8)
    _spell(has_tables)(np.arange(32, dtype=np.int8) % 16, made)
    assert made.tolist() == list(TWICE) * 2
