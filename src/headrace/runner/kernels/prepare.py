"""Gives a loaded CPU model its fast layers; the model's own file stays as it is written."""

from torch import Tensor, nn

from headrace.models.layers import GatedMLP, RMSNorm, Rotary, Rotation
from headrace.runner.kernels.linear import PackedLinear
from headrace.runner.kernels.pointwise import gated, norm, rotate


class CpuRotation(Rotation):
    """Cosines and sines float32 [tokens, dim/2]."""

    def __call__(self, x: Tensor) -> Tensor:
        return rotate(x, self.cos, self.sin)


class CpuRotary(nn.Module):
    def __init__(self, plain: Rotary) -> None:
        super().__init__()
        self.frequencies, self.amplitude = plain.frequencies, plain.amplitude

    def forward(self, positions: Tensor) -> Rotation:
        angles = positions[:, None].float() * self.frequencies  # [tokens, dim/2]
        return CpuRotation(angles.cos().mul_(self.amplitude), angles.sin().mul_(self.amplitude))


class CpuNorm(nn.Module):
    def __init__(self, plain: RMSNorm) -> None:
        super().__init__()
        self.weight, self.eps = plain.weight, plain.eps

    def forward(self, x: Tensor) -> Tensor:
        return norm(x, self.weight, self.eps)


class CpuGatedMLP(nn.Module):
    def __init__(self, plain: GatedMLP) -> None:
        super().__init__()
        self.gate_up, self.down = plain.gate_up, plain.down

    def forward(self, x: Tensor) -> Tensor:
        return self.down(gated(self.gate_up(x)))


_FAST = {RMSNorm: CpuNorm, Rotary: CpuRotary, GatedMLP: CpuGatedMLP}


def prepare(model: nn.Module) -> None:
    """Swaps layers for their fast forms; linear ones are packed while they are loaded."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if fast := _FAST.get(type(child)):
                setattr(parent, name, fast(child))


def weight_bytes(model: nn.Module) -> int:
    """What the weights take in the form they have now, tied ones once."""
    tensors: list[Tensor] = list(model.parameters())
    for module in model.modules():
        if isinstance(module, PackedLinear):
            tensors += module.buffers()
    held = {id(t) if t.is_mkldnn else t.data_ptr(): t for t in tensors}
    return sum(tensor.numel() * tensor.dtype.itemsize for tensor in held.values())
