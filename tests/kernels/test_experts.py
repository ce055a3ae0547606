"""Tests that the product of many experts equals those of each expert, to the bit."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from headrace_kernels.capture import capture
from headrace_kernels.experts import ExpertProduct, can_route
from headrace_kernels.groups import GroupedWeights, Scheme, quantize_groups
from headrace_kernels.layers import CpuGatedMLP, CpuRoutedMLP, PlainStep
from headrace_kernels.linear import GroupedLinear, PackedLinear, quantize_outputs
from headrace_kernels.routing import combine, route
from tests.kernels.own_kernels import OWN_SETS, needs_own_kernels

INPUTS, SIZE, NUM, CHOSEN = 96, 70, 7, 3
Packed = PackedLinear | GroupedLinear
FORMS: dict[str, Callable[[Tensor], Packed]] = {
    "bf16": lambda w: PackedLinear(w.bfloat16(), None, None, OWN_SETS[-1]),
    "bf16 best": lambda w: PackedLinear(w.bfloat16(), None, None),
    "int8": lambda w: PackedLinear(*quantize_outputs(w), torch.randn(len(w))),
    "4 bits": lambda w: GroupedLinear(quantize_groups(w), torch.randn(len(w))),
    "8 bits": lambda w: GroupedLinear(in_8_bits(w, Scheme(8, 32, False)), None),
    "8 bits and minimum": lambda w: GroupedLinear(in_8_bits(w, Scheme(8, 16, True)), None),
}
pytestmark = needs_own_kernels


def in_8_bits(weight: Tensor, scheme: Scheme) -> GroupedWeights:
    size = len(weight), -(-weight.shape[1] // scheme.size)
    scale, minimum = torch.randn(2, *size).half()
    q = weight.mul(40).clamp(-127, 127).to(torch.int8)
    return GroupedWeights(scheme, q, scale, minimum * scheme.has_minimum)


def make(form: str, outputs: int, inputs: int, num: int = NUM) -> list[Packed]:
    torch.manual_seed(0)
    return [FORMS[form](torch.randn(outputs, inputs)) for _ in range(num)]


def routed(form: str, layers: list[Packed], x: Tensor, scores: Tensor) -> Tensor:
    """Return outputs as [tokens, chosen, outputs], in each token's own order."""
    if not can_route(layers[0].operand):
        pytest.skip("no kernel of this instruction set is for experts")
    routing = route(scores, CHOSEN, True)
    y = ExpertProduct([layer.operand for layer in layers])(x, routing)
    return y.flatten(0, 1)[routing.places.long()]


def best(scores: Tensor) -> Tensor:
    return scores.float().sort(dim=-1, descending=True, stable=True).indices[:, :CHOSEN]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_tokens", [1, 2, 9, 300])
def test_each_row_equals_the_product_with_its_expert(form: str, num_tokens: int) -> None:
    layers = make(form, SIZE, INPUTS)
    x, scores = torch.randn(num_tokens, INPUTS).bfloat16(), torch.randn(num_tokens, NUM)
    found = routed(form, layers, x, scores)
    for token, experts in enumerate(best(scores).tolist()):
        for place, expert in enumerate(experts):
            assert torch.equal(found[token, place], layers[expert](x[token : token + 1])[0])


@pytest.mark.parametrize("form", FORMS)
def test_a_row_does_not_depend_on_the_others(form: str) -> None:
    layers = make(form, SIZE, 1024)
    x, scores = torch.randn(220, 1024).bfloat16(), torch.randn(220, NUM)
    whole = routed(form, layers, x, scores)
    for first, stop in ((0, 1), (3, 7), (10, 27), (30, 90)):
        part = slice(first, stop)
        assert torch.equal(routed(form, layers, x[part], scores[part]), whole[part])


def test_all_tokens_may_choose_the_same_experts() -> None:
    layers = make("4 bits", SIZE, 4096)
    x, scores = torch.randn(300, 4096).bfloat16(), torch.arange(NUM).float().repeat(300, 1)
    found = routed("4 bits", layers, x, scores)
    for place, expert in enumerate((6, 5, 4)):
        assert torch.equal(found[:, place], layers[expert](x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sums_to_one", [True, False])
def test_routing_weights_are_those_of_a_softmax(dtype: torch.dtype, sums_to_one: bool) -> None:
    torch.manual_seed(0)
    scores = (3 * torch.randn(50, 128)).to(dtype)
    routing = route(scores, 8, sums_to_one)
    expected = scores.float().softmax(-1).sort(-1, descending=True).values[:, :8]
    if sums_to_one:
        expected = expected / expected.sum(-1, keepdim=True)
    torch.testing.assert_close(routing.weights, expected, rtol=1e-5, atol=1e-7)


def test_rows_are_sorted_by_expert_and_token() -> None:
    scores = torch.randn(40, 5)
    routing = route(scores, 2, True)
    ids = scores.sort(-1, descending=True).indices[:, :2].flatten()
    order = ids.argsort(stable=True)
    assert routing.sources.flatten().tolist() == (order // 2).tolist()
    assert routing.places.flatten()[order].tolist() == list(range(80))
    assert routing.firsts.diff().tolist() == ids.bincount(minlength=5).tolist()


def test_the_first_of_equal_scores_are_chosen_and_nan_is_harmless() -> None:
    equal = route(torch.zeros(1, 9), 3, True)
    assert equal.firsts.diff().tolist() == [1, 1, 1, 0, 0, 0, 0, 0, 0]
    none = route(torch.full((2, 9), torch.nan), 3, True)
    assert none.firsts[-1] == 6 and none.weights.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sum_includes_the_shared_expert(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    routing = route(torch.randn(6, NUM), CHOSEN, True)
    y, shared = torch.randn(6, CHOSEN, 40).to(dtype), torch.randn(6, 40).to(dtype)
    gate = torch.randn(6, 1).to(dtype)
    own = y.float().flatten(0, 1)[routing.places.long()]
    expected = (own * routing.weights[..., None]).sum(1)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    found = combine(y, routing, None, None).float()
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    expected += gate.float().sigmoid() * shared.float()
    found = combine(y, routing, shared, gate).float()
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


class _Plain(nn.Module):
    """An MoE layer with the attributes that the fast layer copies."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.num_chosen, self.sums_to_one = CHOSEN, True
        torch.manual_seed(1)
        self.router = PackedLinear(torch.randn(NUM, INPUTS).bfloat16(), None, None, OWN_SETS[-1])
        gates, downs = make(form, 2 * SIZE, INPUTS, NUM + 1), make(form, INPUTS, SIZE, NUM + 1)
        mlps = [self._mlp(*pair) for pair in zip(gates, downs, strict=True)]
        self.experts, self.shared = nn.ModuleList(mlps[:-1]), mlps[-1]
        self.shared_gate = PackedLinear(torch.randn(1, INPUTS).bfloat16(), None, None, OWN_SETS[-1])

    def _mlp(self, gate_up: nn.Module, down: nn.Module) -> CpuGatedMLP:
        plain = nn.Module()
        plain.gate_up, plain.down = gate_up, down
        return CpuGatedMLP(plain)


@pytest.mark.parametrize("form", ["bf16", "int8", "4 bits"])
def test_a_captured_step_routes_each_token_anew(form: str) -> None:
    layer = CpuRoutedMLP(_Plain(form))
    steady = torch.zeros(20, INPUTS).bfloat16()
    graph, result = capture(lambda: layer(steady, PlainStep), [steady], {})
    for num_tokens in (20, 1, 7):
        x = torch.randn(num_tokens, INPUTS).bfloat16()
        steady[:num_tokens] = x
        for call in graph.first_rows(num_tokens):
            call()
        assert torch.equal(result[:num_tokens], layer(x, PlainStep))


def test_a_long_step_is_processed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = CpuRoutedMLP(_Plain("4 bits")), torch.randn(50, INPUTS).bfloat16()
    whole = layer(x, PlainStep)
    monkeypatch.setattr("headrace_kernels.layers._TOKENS_AT_ONCE", 16)
    assert torch.equal(layer(x, PlainStep), whole)
