import pytest
import torch
from torch import Tensor, nn

from headrace_kernels import product as module
from headrace_kernels.instruction_sets import InstructionSet
from headrace_kernels.launch import Kernel
from headrace_kernels.linear import PackedLinear, pack_linear, quantize_outputs
from tests.kernels.own_kernels import OWN_SETS


@pytest.fixture(params=OWN_SETS)
def instructions(request: pytest.FixtureRequest) -> InstructionSet:
    instructions: InstructionSet = request.param
    return instructions


def make_linear(inputs: int, outputs: int, bias: bool, dtype: torch.dtype) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(inputs, outputs, bias=bias).to(dtype).requires_grad_(False)


def exact(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    bias = 0 if linear.bias is None else linear.bias.double()
    return x.double() @ linear.weight.double().T + bias


@pytest.mark.parametrize("rows", [*range(1, 19), 23, 32, 33, 40, 150])
@pytest.mark.parametrize(
    ("inputs", "outputs", "bias"),
    [
        (96, 67, True),
        (1024, 130, False),
        (64, 128, False),
        (38, 67, True),
        (37, 12, True),
        (1030, 130, False),
        (7, 1, True),
    ],
)
def test_packed_bfloat16_is_exact_up_to_one_rounding(
    instructions: InstructionSet, rows: int, inputs: int, outputs: int, bias: bool
) -> None:
    linear = make_linear(inputs, outputs, bias, torch.bfloat16)
    x = torch.randn(rows, inputs).bfloat16()
    found = PackedLinear(linear.weight, None, linear.bias, instructions)(x)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact(linear, x), rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "inputs"),
    [(torch.bfloat16, 3100), (torch.bfloat16, 3104), (torch.int8, 3100), (torch.int8, 3200)],
)
def test_a_row_does_not_depend_on_other_rows(
    instructions: InstructionSet, dtype: torch.dtype, inputs: int
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(100, inputs).mul_(30).to(dtype)
    packed = PackedLinear(weight, None, None, instructions)
    x = torch.randn(220, inputs).bfloat16()
    whole = packed(x)  # several blocks of rows
    for first, stop in [(0, 1), (1, 3), (3, 7), (10, 27), (30, 43), (100, 120), (180, 213)]:
        assert torch.equal(packed(x[first:stop]), whole[first:stop])


@pytest.mark.parametrize("rows", [1, 3, 8, 40, 41, 80])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_int8_is_the_product_with_the_rounded_weights(
    instructions: InstructionSet, rows: int, dtype: torch.dtype
) -> None:
    linear = make_linear(64, 70, True, dtype)
    x = torch.randn(rows, 64).to(dtype)
    stored, scale = quantize_outputs(linear.weight)
    expected = x.double() @ (stored.double() * scale[:, None]).T + linear.bias.double()
    found = PackedLinear(stored, scale, linear.bias, instructions)(x)
    tolerance = 2**-7 if dtype == torch.bfloat16 else 5e-4
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance / 10)


@pytest.mark.parametrize("inputs", [127, 128, 300])
def test_int8_inputs_are_rounded_by_group(inputs: int) -> None:
    torch.manual_seed(0)
    weight = torch.randint(-127, 128, (40, inputs), dtype=torch.int8)
    x = torch.randn(5, inputs) * torch.logspace(-3, 3, inputs)  # the largest are far above the rest
    found = PackedLinear(weight, torch.ones(40), None)(x).double()
    largest = torch.stack([group.abs().amax(1) for group in x.split(128, 1)], 1).double()
    weights = torch.stack([group.double().abs().sum(1) for group in weight.split(128, 1)])
    bound = largest @ weights / (2 * 32767)  # half a step of each group's scale
    error = (found - x.double() @ weight.double().T).abs()
    assert (error <= 1.01 * bound).all() and (error > 0.001 * bound).any()


@pytest.mark.parametrize("inputs", [128, 3200])
def test_int8_products_equal_those_of_plain_vectors(
    instructions: InstructionSet, inputs: int
) -> None:
    torch.manual_seed(0)
    weight = torch.randint(-128, 128, (100, inputs), dtype=torch.int8)
    scale, bias = torch.rand(100), torch.randn(100)
    x = (torch.randn(120, inputs) * torch.logspace(-3, 1, inputs)).bfloat16()
    found = PackedLinear(weight, scale, bias, instructions)(x)
    assert torch.equal(found, PackedLinear(weight, scale, bias, OWN_SETS[-1])(x))


def test_int8_products_of_zeros_and_of_the_largest_numbers_are_right() -> None:
    weight = torch.full((32, 128), 127, dtype=torch.int8)
    packed = PackedLinear(weight, torch.ones(32), None)
    assert torch.equal(packed(torch.zeros(1, 128)), torch.zeros(1, 32))
    torch.testing.assert_close(packed(torch.ones(1, 128)), torch.full((1, 32), 127.0 * 128))


def test_leading_dimensions_are_kept() -> None:
    linear = make_linear(32, 48, False, torch.bfloat16)
    assert PackedLinear(linear.weight, None, None)(torch.ones(2, 3, 32).bfloat16()).shape == (
        (2, 3, 48)
    )


@pytest.mark.parametrize(
    ("instructions", "inputs", "kernel"),
    [
        ("amx", 64, module.BF16_BY_BF16_AMX),
        ("amx", 37, module.BF16_BY_BF16),
        ("bf16dot", 37, module.BF16_BY_BF16_DOT),
        ("avx512", 64, module.BF16_BY_BF16),
        ("avx2", 64, module.BF16_BY_BF16),
    ],
)
def test_the_kernel_follows_the_instruction_set_and_the_number_of_inputs(
    instructions: InstructionSet, inputs: int, kernel: Kernel
) -> None:
    kernels = module.kernels_for(instructions, inputs, torch.bfloat16)
    assert kernels[torch.bfloat16] is kernel


def test_float32_weights_stay_as_they_are() -> None:
    plain = nn.Sequential(make_linear(8, 8, False, torch.float32))
    pack_linear(plain, "0")
    assert type(plain[0]) is nn.Linear


def relative_loss(weight: Tensor) -> float:
    """Return the root mean square error of int8, relative to the root mean square weight."""
    stored, scale = quantize_outputs(weight)
    error = stored * scale[:, None] - weight.float()
    return float(error.norm() / weight.float().norm())


def test_int8_rounds_random_weights_by_less_than_2_percent() -> None:
    torch.manual_seed(0)
    assert 0.001 < relative_loss(torch.randn(64, 1024)) < 0.02
