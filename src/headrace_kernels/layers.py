"""Gives a loaded CPU model its fast layers; the model's own file stays as it is written."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headrace_kernels.delta_gates import GATED_NORM, GATES, delta_gates, gated_norm
from headrace_kernels.experts import ExpertProduct, can_route
from headrace_kernels.fuse import IN_TURN
from headrace_kernels.launch import Kernel
from headrace_kernels.linear import GroupedLinear, PackedLinear
from headrace_kernels.pointwise import (
    ADD,
    CLAMPED,
    GATE,
    GATE_BY,
    GELU,
    NORM,
    ROTATE,
    gated,
    gated_by,
    norm,
    rotate,
)
from headrace_kernels.routing import combine, route

_TOKENS_AT_ONCE = 1024  # of experts


class CpuRotary(nn.Module):
    """Gives the rotation of a step's positions, a function of x [tokens, heads, dim]."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.angles, self.amplitude = plain.angles, plain.amplitude

    def forward(self, positions: Tensor) -> Callable[[Tensor], Tensor]:
        angles = self.angles(positions)  # float32 [tokens, turned/2]
        cos, sin = angles.cos().mul_(self.amplitude), angles.sin().mul_(self.amplitude)
        return partial(rotate, cos=cos, sin=sin)


class CpuNorm(nn.Module):
    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.weight, self.eps = plain.weight, plain.eps

    def forward(self, x: Tensor) -> Tensor:
        return norm(x, self.weight, self.eps)


class CpuShiftedNorm(nn.Module):
    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.weight, self.eps = plain.weight, plain.eps

    def forward(self, x: Tensor) -> Tensor:
        return norm(x, self.weight, self.eps, shift=1)


class CpuGatedNorm(nn.Module):
    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.weight, self.eps = plain.weight, plain.eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return gated_norm(x, gate, self.weight, self.eps)


class CpuSigmoidGate(nn.Module):
    def __init__(self, plain: Any) -> None:
        super().__init__()

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return gated_by(x, gate)


class CpuConvolution(nn.Module):
    """Weights [width, channels]: a vector holds those of neighbours."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.layer = plain.layer
        self.weight = nn.Parameter(plain.weight[:, 0].T.contiguous(), requires_grad=False)

    def forward(self, x: Tensor, step: Any) -> Tensor:
        return step.convolve(self.layer, x, self.weight)


class CpuDeltaGates(nn.Module):
    """float32 [2, heads]: the rate at which a head forgets, less than 0, and what is added."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.A_log, self.dt_bias = plain.A_log, plain.dt_bias
        rates = -plain.A_log.float().exp()
        table = torch.stack((rates, plain.dt_bias.float())).contiguous()
        self.table = nn.Buffer(table, persistent=False)  # what it is made of is kept, too

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return delta_gates(a, b, self.table)


class CpuGatedMLP(nn.Module):
    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.gate_up, self.down = plain.gate_up, plain.down

    def forward(self, x: Tensor, step: Any) -> Tensor:
        return step.linear(self.down, self.activate(step.linear(self.gate_up, x)))

    @staticmethod
    def activate(x: Tensor) -> Tensor:
        """Gate and up [..., 2 * size] as what goes into `down`."""
        return gated(x)


class CpuGeluMLP(CpuGatedMLP):
    @staticmethod
    def activate(x: Tensor) -> Tensor:
        return gated(x, GELU)


class CpuClampedMLP(CpuGatedMLP):
    @staticmethod
    def activate(x: Tensor) -> Tensor:
        return gated(x, CLAMPED)


class Bare:
    """Linear layers as they are, in place of a step."""

    @staticmethod
    def linear(layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x)


class CpuRoutedMLP(nn.Module):
    """Experts that are packed, as two products for all of them."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.num_chosen, self.sums_to_one = plain.num_chosen, plain.sums_to_one
        self.router, self.experts = plain.router, plain.experts
        self.shared, self.shared_gate = plain.shared, plain.shared_gate
        self._activate = plain.experts[0].activate
        self._gate_up = ExpertProduct([expert.gate_up.operand for expert in plain.experts])
        self._down = ExpertProduct([expert.down.operand for expert in plain.experts])

    def forward(self, x: Tensor, step: Any) -> Tensor:
        if len(x) > _TOKENS_AT_ONCE:  # what lies between the products is some times as large as x
            return torch.cat([self(part, step) for part in x.split(_TOKENS_AT_ONCE)])
        routing = route(self.router(x), self.num_chosen, self.sums_to_one)
        y = self._down(self._activate(self._gate_up(x.contiguous(), routing)), routing)
        if self.shared is None:
            return combine(y, routing, None, None)
        return combine(y, routing, self.shared(x, Bare), self.shared_gate(x))


def _routed(plain: Any) -> Any:
    """As it is where no kernel is for its experts: they are computed one after another."""
    layers = [plain.experts[0].gate_up, plain.experts[0].down]
    if all(isinstance(it, PackedLinear | GroupedLinear) and can_route(it.operand) for it in layers):
        return CpuRoutedMLP(plain)
    return plain


_FAST: Mapping[str, Callable[[Any], nn.Module]] = {
    "norm": CpuNorm,  # weight, eps
    "shifted-norm": CpuShiftedNorm,  # the same; weights are kept less 1
    "gated-norm": CpuGatedNorm,  # the same; of x and a gate
    "sigmoid-gate": CpuSigmoidGate,
    "rotary": CpuRotary,  # angles(positions), amplitude
    "gated-mlp": CpuGatedMLP,  # gate_up, down
    "gelu-mlp": CpuGeluMLP,  # the same
    "clamped-mlp": CpuClampedMLP,  # the same, with gpt-oss's constants
    "routed-mlp": _routed,  # router, experts, num_chosen, sums_to_one, shared, shared_gate
    "convolution": CpuConvolution,  # layer, weight
    "delta-gates": CpuDeltaGates,  # A_log, dt_bias
}
"""The kinds of layers that have a fast version, and the attributes that it takes over."""


_KERNELS: Mapping[str, Mapping[torch.dtype, Kernel]] = {
    "norm": NORM,
    "shifted-norm": NORM,
    "gated-norm": GATED_NORM,
    "sigmoid-gate": GATE_BY,
    "rotary": ROTATE,
    "gated-mlp": GATE,
    "clamped-mlp": GATE,
    "delta-gates": GATES,
}
"""The kernels of these layers alone, by the type of their inputs; steps run the others."""


def kernels_of(kinds: Iterable[str], dtype: torch.dtype) -> list[Kernel]:
    """Kernels that layers of these kinds will run, and those of a captured step between them."""
    tables = [_KERNELS[kind] for kind in sorted(kinds) if kind in _KERNELS]
    return [table[dtype] for table in (*tables, ADD)] + [IN_TURN] if tables else []


def prepare(model: nn.Module, kinds: Mapping[type, str]) -> None:
    """Swaps layers of these classes for their fast versions; linear ones are packed at loading."""
    for parent in reversed(list(model.modules())):  # the parts of a layer before it
        for name, child in list(parent.named_children()):
            if kind := kinds.get(type(child)):
                setattr(parent, name, _FAST[kind](child))
