"""Replaces layers of a loaded CPU model with fast versions. The model's code does not change."""

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

# How many tokens a layer of experts computes at a time.
_TOKENS_AT_ONCE = 1024


class CpuRotary(nn.Module):
    """Rotary embedding: makes a function that rotates x [tokens, heads, dim] by given positions."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.angles, self.amplitude = plain.angles, plain.amplitude

    def forward(self, positions: Tensor) -> Callable[[Tensor], Tensor]:
        angles = self.angles(positions)  # float32 [tokens, rotated / 2]
        cos, sin = angles.cos().mul_(self.amplitude), angles.sin().mul_(self.amplitude)
        return partial(rotate, cos=cos, sin=sin)


class CpuNorm(nn.Module):
    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.weight, self.eps = plain.weight, plain.eps

    def forward(self, x: Tensor) -> Tensor:
        return norm(x, self.weight, self.eps)


class CpuUnitNorm(nn.Module):
    """A norm without weights. Its kernel adds 1 to the weights, so zeros are passed to it."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.size, self.eps = plain.size, plain.eps
        self.zeros = {type: torch.zeros(plain.size, dtype=type) for type in NORM}

    def forward(self, x: Tensor) -> Tensor:
        return norm(x, self.zeros[x.dtype], self.eps, shift=1)


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
    """A convolution with weights [width, channels], so a vector holds neighbouring channels."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.layer = plain.layer
        self.weight = nn.Parameter(plain.weight[:, 0].T.contiguous(), requires_grad=False)

    def forward(self, x: Tensor, step: Any) -> Tensor:
        return step.convolve(self.layer, x, self.weight)


class CpuDeltaGates(nn.Module):
    """The gates of a delta net, computed with a float32 table [2, heads].

    Row 0 is the decay rate of each head, a negative number. Row 1 is the shift that is added to
    the head's input.
    """

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.A_log, self.dt_bias = plain.A_log, plain.dt_bias
        rates = -plain.A_log.float().exp()
        table = torch.stack((rates, plain.dt_bias.float())).contiguous()
        # The parameters from which the table is made are also kept.
        self.table = nn.Buffer(table, persistent=False)

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
        """Apply the activation to gate and up [..., 2 * size]; return the input of `down`."""
        return gated(x)


class CpuGeluMLP(CpuGatedMLP):
    @staticmethod
    def activate(x: Tensor) -> Tensor:
        return gated(x, GELU)


class CpuClampedMLP(CpuGatedMLP):
    @staticmethod
    def activate(x: Tensor) -> Tensor:
        return gated(x, CLAMPED)


class PlainStep:
    """Replaces the step for linear layers that no adapter changes."""

    @staticmethod
    def linear(layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x)


class CpuRoutedMLP(nn.Module):
    """A layer of packed experts, computed as two products over all experts."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.num_chosen, self.sums_to_one = plain.num_chosen, plain.sums_to_one
        self.router, self.experts = plain.router, plain.experts
        self.shared, self.shared_gate = plain.shared, plain.shared_gate
        self._activate = plain.experts[0].activate
        self._gate_up = ExpertProduct([expert.gate_up.operand for expert in plain.experts])
        self._down = ExpertProduct([expert.down.operand for expert in plain.experts])

    def forward(
        self, x: Tensor, step: Any, scores: Tensor | None = None, scale: Tensor | None = None
    ) -> Tensor:
        """Return the weighted sum of each token's experts.

        `scores` [tokens, experts] replace the router's scores of x. `scale` [experts] multiplies
        the weights.
        """
        scores = self.router(x) if scores is None else scores
        # The values between the two products take several times as much memory as x. So a long x is
        # computed in several parts.
        if len(x) > _TOKENS_AT_ONCE:
            parts = zip(x.split(_TOKENS_AT_ONCE), scores.split(_TOKENS_AT_ONCE), strict=True)
            return torch.cat([self(part, step, its, scale) for part, its in parts])
        routing = route(scores, self.num_chosen, self.sums_to_one)
        if scale is not None:
            routing.weights.mul_(scale[routing.ids])
        y = self._down(self._activate(self._gate_up(x.contiguous(), routing)), routing)
        if self.shared is None:
            return combine(y, routing, None, None)
        return combine(y, routing, self.shared(x, PlainStep), self.shared_gate(x))


def _routed(plain: Any) -> Any:
    """Return the fast layer of experts, or the plain layer if no kernel supports the weight format.

    The plain layer computes one expert after another.
    """
    layers = [plain.experts[0].gate_up, plain.experts[0].down]
    if all(isinstance(it, PackedLinear | GroupedLinear) and can_route(it.operand) for it in layers):
        return CpuRoutedMLP(plain)
    return plain


_FAST: Mapping[str, Callable[[Any], nn.Module]] = {
    "norm": CpuNorm,  # weight, eps
    "unit-norm": CpuUnitNorm,  # size, eps
    "shifted-norm": CpuShiftedNorm,  # weight, eps; weights are stored minus 1
    "gated-norm": CpuGatedNorm,  # weight, eps; takes x and a gate
    "sigmoid-gate": CpuSigmoidGate,
    "rotary": CpuRotary,  # angles(positions), amplitude
    "gated-mlp": CpuGatedMLP,  # gate_up, down
    "gelu-mlp": CpuGeluMLP,  # gate_up, down
    "clamped-mlp": CpuClampedMLP,  # gate_up, down; with the constants of gpt-oss
    "routed-mlp": _routed,  # router, experts, num_chosen, sums_to_one, shared, shared_gate
    "convolution": CpuConvolution,  # layer, weight
    "delta-gates": CpuDeltaGates,  # A_log, dt_bias
}
"""The fast version of each kind of layer. The comments name the attributes that are read."""


_KERNELS: Mapping[str, Mapping[torch.dtype, Kernel]] = {
    "norm": NORM,
    "unit-norm": NORM,
    "shifted-norm": NORM,
    "gated-norm": GATED_NORM,
    "sigmoid-gate": GATE_BY,
    "rotary": ROTATE,
    "gated-mlp": GATE,
    "clamped-mlp": GATE,
    "delta-gates": GATES,
}
"""The kernels that layers launch themselves, by the dtype of the inputs.

A step launches all other kernels.
"""


def kernels_of(kinds: Iterable[str], dtype: torch.dtype) -> list[Kernel]:
    """Return the kernels that layers of these kinds launch.

    If these layers launch kernels, also return the two kernels that only a captured step needs.
    """
    tables = [_KERNELS[kind] for kind in sorted(kinds) if kind in _KERNELS]
    return [table[dtype] for table in (*tables, ADD)] + [IN_TURN] if tables else []


def prepare(model: nn.Module, kinds: Mapping[type, str]) -> None:
    """Replace layers of these classes by fast versions.

    Linear layers are not replaced here, because they are packed during loading.
    """
    # A layer's parts are replaced before the layer itself.
    for parent in reversed(list(model.modules())):
        for name, child in list(parent.named_children()):
            if kind := kinds.get(type(child)):
                setattr(parent, name, _FAST[kind](child))
