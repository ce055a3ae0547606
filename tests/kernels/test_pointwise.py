import pytest
import torch
import torch.nn.functional as F

from headrace_kernels import pointwise
from headrace_kernels.pointwise import CLAMPED, GELU, gated, norm, rotate

DTYPES = [(torch.float32, 1e-5), (torch.bfloat16, 2**-7)]


@pytest.fixture(params=[0, 1 << 20], ids=["parallel", "alone"], autouse=True)
def threshold(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pointwise, "_ALONE", request.param)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_norm_of_rows_and_of_strided_heads(dtype: torch.dtype, tolerance: float) -> None:
    weight = torch.randn(24).to(dtype)
    for x in (torch.randn(7, 24), torch.randn(5, 6, 24)[:, 1:4]):
        x = x.to(dtype)
        expected = F.rms_norm(x.double(), (24,), weight.double(), 1e-6)
        found = norm(x, weight, 1e-6).double()
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_the_eps_of_norm_has_an_effect() -> None:
    x = torch.full((1, 8), 1e-3)
    expected = F.rms_norm(x, (8,), torch.ones(8), 1e-5)
    torch.testing.assert_close(norm(x, torch.ones(8), 1e-5), expected)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_rotation_turns_pairs(dtype: torch.dtype, tolerance: float) -> None:
    x = torch.randn(5, 6, 8).to(dtype)[:, 2:5]
    angles = torch.randn(5, 4)
    pairs = torch.complex(*x.double().chunk(2, dim=-1))
    turned = pairs * torch.polar(torch.ones(5, 4), angles).to(torch.complex128)[:, None]
    found = rotate(x, angles.cos(), angles.sin()).double()
    expected = torch.cat((turned.real, turned.imag), dim=-1)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
def test_the_gate_is_right_for_very_large_and_small_inputs(
    dtype: torch.dtype, tolerance: float
) -> None:
    x = torch.cat((torch.linspace(-200, 200, 101).repeat(3, 1), torch.randn(3, 101)), 1).to(dtype)
    gate, up = x.double().chunk(2, dim=-1)
    torch.testing.assert_close(gated(x).double(), F.silu(gate) * up, rtol=tolerance, atol=1e-5)
    found, gelu = gated(x, GELU).double(), F.gelu(gate, approximate="tanh")
    torch.testing.assert_close(found, gelu * up, rtol=tolerance, atol=1e-5)
    low, between = gate.clamp(max=7), up.clamp(-7, 7)
    expected = low * (1.702 * low).sigmoid() * (between + 1)
    torch.testing.assert_close(gated(x, CLAMPED).double(), expected, rtol=tolerance, atol=1e-5)
