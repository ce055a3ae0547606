"""Tests the kernels of a gated delta net, in common and in odd sizes."""

from collections.abc import Iterable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from headrace_kernels.choose import delta_rule_by_formula
from headrace_kernels.delta_net import convolve, delta_rule
from tests.kernels.attention_case import Step, make_step
from tests.kernels.own_kernels import needs_own_kernels

pytestmark = needs_own_kernels
TOKENS, SLOTS = 40, 2
CUTS = ([1] * TOKENS, [3, 30, 7], [33, 7])
GIVEN = torch.Generator().manual_seed(0)


def steps(lengths: Iterable[int]) -> Iterator[tuple[slice, Step]]:
    """Yield the steps of a sequence in the last slot, chunk by chunk."""
    start = 0
    for length in lengths:
        yield slice(start, start + length), make_step([(start, length)], [[0]], [SLOTS - 1])
        start += length


@pytest.mark.parametrize("heads", [2, 4])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(128, 128), (7, 64), (16, 12)])
def test_the_delta_rule_follows_the_formulas_in_any_chunks(
    heads: int, key_dim: int, value_dim: int
) -> None:
    sizes = (2 * key_dim, 2 * key_dim, heads * value_dim)
    dims = key_dim, key_dim, value_dim
    rows = torch.randn(TOKENS, sum(sizes), generator=GIVEN)
    q, k, v = (
        part.unflatten(1, (-1, d)) for part, d in zip(rows.split(sizes, 1), dims, strict=True)
    )
    decay = -torch.rand(TOKENS, heads, generator=GIVEN)
    beta = torch.rand(TOKENS, heads, generator=GIVEN)

    def run(lengths: Iterable[int]) -> tuple[Tensor, Tensor]:
        states = torch.full((SLOTS, heads, key_dim, value_dim), 7.0)  # left by an earlier sequence
        found = [
            delta_rule(step, states, (q[at], k[at], v[at]), decay[at], beta[at])
            for at, step in steps(lengths)
        ]
        return torch.cat(found), states[-1]

    out, state = run([TOKENS])
    zeros = torch.zeros(heads, key_dim, value_dim, dtype=torch.float64)
    wide = q.double(), k.double(), v.double()
    expected = delta_rule_by_formula(wide, decay.double(), beta.double(), zeros)
    torch.testing.assert_close(out, expected.float(), rtol=1e-5, atol=1e-6)
    for cut in CUTS:
        again, moved = run(cut)
        assert torch.equal(again, out) and torch.equal(moved, state)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("channels", "width"), [(600, 4), (256, 4), (20, 2), (17, 5)])
def test_the_convolution_equals_torchs_in_any_chunks(
    channels: int, width: int, dtype: torch.dtype
) -> None:
    x = torch.randn(TOKENS, channels + 5, generator=GIVEN).to(dtype)[:, :channels]
    weight = torch.randn(width, channels, generator=GIVEN).to(dtype)

    def run(lengths: Iterable[int]) -> tuple[Tensor, Tensor]:
        inputs = torch.full((SLOTS, width - 1, channels), 7.0).to(dtype)
        parts = [convolve(step, inputs, x[at], weight) for at, step in steps(lengths)]
        return torch.cat(parts), inputs[-1]

    out, left = run([TOKENS])
    inputs = F.pad(x.float().T, (width - 1, 0))
    expected = F.silu(F.conv1d(inputs, weight.float().T[:, None], groups=channels).T)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(left, x[TOKENS - width + 1 :])
    for cut in CUTS:
        again, moved = run(cut)
        assert torch.equal(again, out) and torch.equal(moved, left)
