import pytest
import torch
from torch import nn

from headrace.runner.kernels import linear as module
from headrace.runner.kernels.linear import (
    FEW_ROWS,
    ReorderedLinear,
    StoredLinear,
    pack_linears,
    quantize,
    relative_loss,
)


def make_linear(inputs: int, outputs: int, bias: bool, dtype: torch.dtype) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, bias=bias).to(dtype).requires_grad_(False)


def exact(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    bias = 0 if linear.bias is None else linear.bias.double()
    return x.double() @ linear.weight.double().T + bias


@pytest.mark.parametrize("rows", [1, 2, 4, 7, FEW_ROWS, FEW_ROWS + 1])
@pytest.mark.parametrize(
    ("inputs", "outputs", "bias"), [(64, 128, False), (38, 67, True), (37, 12, True)]
)
def test_stored_bfloat16_is_exact_but_for_one_rounding(
    rows: int, inputs: int, outputs: int, bias: bool
) -> None:
    linear = make_linear(inputs, outputs, bias, torch.bfloat16)
    x = torch.randn(rows, inputs).bfloat16()
    found = StoredLinear(linear.weight, None, linear.bias)(x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact(linear, x), rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("rows", [49, 64, 80, 96, 112, 150])
@pytest.mark.parametrize(("inputs", "outputs"), [(513, 63), (1030, 130), (16, 64), (7, 1)])
def test_many_rows_of_every_width_of_panel(rows: int, inputs: int, outputs: int) -> None:
    linear = make_linear(inputs, outputs, True, torch.bfloat16)
    x = torch.randn(rows, inputs).bfloat16()
    found = StoredLinear(linear.weight, None, linear.bias)(x)
    torch.testing.assert_close(found.double(), exact(linear, x), rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 3, 8, 40, FEW_ROWS + 1])
@pytest.mark.parametrize("is_fast", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_int8_is_the_product_with_the_rounded_weights(
    rows: int, dtype: torch.dtype, is_fast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "has_fast_bf16", lambda: is_fast)
    linear = make_linear(64, 70, True, dtype)
    x = torch.randn(rows, 64).to(dtype)
    stored, scale = quantize(linear.weight)
    expected = x.double() @ (stored.double() * scale[:, None]).T + linear.bias.double()
    found = StoredLinear(stored, scale, linear.bias)(x)
    tolerance = 2**-7 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance / 10)


def test_leading_dimensions_are_kept() -> None:
    linear = make_linear(32, 48, False, torch.bfloat16)
    assert StoredLinear(linear.weight, None, None)(torch.ones(2, 3, 32).bfloat16()).shape == (
        (2, 3, 48)
    )


def test_the_reordered_form_equals_the_plain_one() -> None:
    linear = make_linear(64, 96, True, torch.bfloat16)
    x = torch.randn(5, 64).bfloat16()
    found = ReorderedLinear(linear)(x).double()
    torch.testing.assert_close(found, exact(linear, x), rtol=2**-7, atol=2e-2)


@pytest.mark.parametrize(
    ("has", "can", "form"),
    [(False, True, StoredLinear), (True, True, ReorderedLinear), (True, False, nn.Linear)],
)
def test_the_form_follows_the_processor_and_the_self_check(
    has: bool, can: bool, form: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "has_fast_bf16", lambda: has)
    monkeypatch.setattr(module, "can_reorder", lambda: can)
    model = nn.Sequential(make_linear(64, 64, False, torch.bfloat16))
    pack_linears(model)
    assert type(model[0]) is form


def test_float32_weights_stay_as_they_are_and_tied_ones_are_not_copied() -> None:
    plain = nn.Sequential(make_linear(8, 8, False, torch.float32))
    pack_linears(plain)
    assert type(plain[0]) is nn.Linear
    linear = make_linear(64, 64, False, torch.bfloat16)
    assert StoredLinear(linear.weight, None, None).weight.data_ptr() == linear.weight.data_ptr()


def test_int8_loses_less_than_two_hundredths_of_random_weights() -> None:
    torch.manual_seed(0)
    assert 0.001 < relative_loss(torch.randn(64, 1024)) < 0.02
