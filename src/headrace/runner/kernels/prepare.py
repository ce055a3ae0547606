"""Gives a loaded CPU model its fast layers; the model's own file stays as it is written."""

import torch
from torch import Tensor, nn

from headrace.models.layers import (
    Convolution,
    DeltaGates,
    GatedMLP,
    GatedNorm,
    RMSNorm,
    Rotary,
    Rotation,
    ShiftedNorm,
    SigmoidGate,
)
from headrace.models.step import Step
from headrace.runner.kernels.delta_gates import delta_gates, gated_norm
from headrace.runner.kernels.linear import GroupedLinear, PackedLinear
from headrace.runner.kernels.pointwise import gated, gated_by, norm, rotate


class CpuRotation(Rotation):
    """Cosines and sines float32 [tokens, dim/2]."""

    def __call__(self, x: Tensor) -> Tensor:
        return rotate(x, self.cos, self.sin)


class CpuRotary(nn.Module):
    def __init__(self, plain: Rotary) -> None:
        super().__init__()
        self.angles, self.amplitude = plain.angles, plain.amplitude

    def forward(self, positions: Tensor) -> Rotation:
        angles = self.angles(positions)  # [tokens, dim/2]
        return CpuRotation(angles.cos().mul_(self.amplitude), angles.sin().mul_(self.amplitude))


class CpuNorm(nn.Module):
    def __init__(self, plain: RMSNorm) -> None:
        super().__init__()
        self.weight, self.eps = plain.weight, plain.eps

    def forward(self, x: Tensor) -> Tensor:
        return norm(x, self.weight, self.eps)


class CpuShiftedNorm(nn.Module):
    def __init__(self, plain: ShiftedNorm) -> None:
        super().__init__()
        self.weight, self.eps = plain.weight, plain.eps

    def forward(self, x: Tensor) -> Tensor:
        return norm(x, self.weight, self.eps, shift=1)


class CpuGatedNorm(nn.Module):
    def __init__(self, plain: GatedNorm) -> None:
        super().__init__()
        self.weight, self.eps = plain.weight, plain.eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return gated_norm(x, gate, self.weight, self.eps)


class CpuSigmoidGate(nn.Module):
    def __init__(self, plain: SigmoidGate) -> None:
        super().__init__()

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return gated_by(x, gate)


class CpuConvolution(nn.Module):
    """Weights [width, channels]: a vector holds those of neighbours."""

    def __init__(self, plain: Convolution) -> None:
        super().__init__()
        self.layer = plain.layer
        self.weight = nn.Parameter(plain.weight[:, 0].T.contiguous(), requires_grad=False)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        return step.convolve(self.layer, x, self.weight)


class CpuDeltaGates(nn.Module):
    """float32 [2, heads]: the rate at which a head forgets, less than 0, and what is added."""

    def __init__(self, plain: DeltaGates) -> None:
        super().__init__()
        self.A_log, self.dt_bias = plain.A_log, plain.dt_bias
        rates = -plain.A_log.float().exp()
        self.table = nn.Buffer(torch.stack((rates, plain.dt_bias.float())).contiguous())

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return delta_gates(a, b, self.table)


class CpuGatedMLP(nn.Module):
    def __init__(self, plain: GatedMLP) -> None:
        super().__init__()
        self.gate_up, self.down = plain.gate_up, plain.down

    def forward(self, x: Tensor) -> Tensor:
        return self.down(gated(self.gate_up(x)))


_FAST = {
    RMSNorm: CpuNorm,
    ShiftedNorm: CpuShiftedNorm,
    GatedNorm: CpuGatedNorm,
    SigmoidGate: CpuSigmoidGate,
    Rotary: CpuRotary,
    GatedMLP: CpuGatedMLP,
    Convolution: CpuConvolution,
    DeltaGates: CpuDeltaGates,
}


def prepare(model: nn.Module) -> None:
    """Swaps layers for their fast versions; linear ones are packed while they are loaded."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if fast := _FAST.get(type(child)):
                setattr(parent, name, fast(child))


def weight_bytes(model: nn.Module) -> int:
    """Bytes of the weights as they are stored now; tied ones count once."""
    tensors: list[Tensor] = list(model.parameters())
    for module in model.modules():
        if isinstance(module, PackedLinear | GroupedLinear):
            tensors += module.buffers()
    held = {id(t) if t.is_mkldnn else t.data_ptr(): t for t in tensors}
    return sum(tensor.numel() * tensor.dtype.itemsize for tensor in held.values())
