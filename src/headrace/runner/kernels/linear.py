"""Owns how weights lie in memory: packed once for our own product; models keep plain nn.Linear."""

import torch
from torch import Tensor, nn

from headrace.runner.kernels.forms import Form
from headrace.runner.kernels.product import Operand, pack, product

_OUTPUTS_AT_ONCE = 256  # of float32 while quantizing: a whole matrix may be a tenth of the model


class PackedLinear(nn.Module):
    """Weights [outputs, inputs] packed: bfloat16, or int8 with one scale per output."""

    def __init__(
        self,
        weight: Tensor,
        scale: Tensor | None,
        bias: Tensor | None,
        form: Form | None = None,
    ) -> None:
        super().__init__()
        size, num_inputs = weight.shape
        self.weight = nn.Buffer(pack(weight))
        self.scale = nn.Buffer(torch.ones(size) if scale is None else scale)
        self.bias = nn.Buffer(torch.zeros(size) if bias is None else bias.detach().float())
        self._operand = Operand(self.weight, num_inputs, self.scale, self.bias, form)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 2:
            return self(x.flatten(0, -2)).unflatten(0, x.shape[:-1])
        return product(x, self._operand)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 weight and float32 scale per output: weight = int8 * scale, to the nearest."""
    stored = torch.empty(weight.shape, dtype=torch.int8)
    scale = torch.empty(len(weight))
    for first in range(0, len(weight), _OUTPUTS_AT_ONCE):
        part = slice(first, first + _OUTPUTS_AT_ONCE)
        wide = weight.detach()[part].float()
        scale[part] = wide.abs().amax(dim=1).clamp_(min=1e-12) / 127
        stored[part] = (wide / scale[part, None]).round_()
    return stored, scale


def pack_linear(
    model: nn.Module, path: str, to_int8: bool = False, form: Form | None = None
) -> None:
    """Give the module at `path` of a CPU model the fastest form here, if it is a linear layer."""
    linear = model.get_submodule(path)
    if type(linear) is nn.Linear:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, _packed(linear, to_int8, form))


def _packed(linear: nn.Linear, to_int8: bool, form: Form | None) -> nn.Module:
    if to_int8:
        return PackedLinear(*quantize(linear.weight), linear.bias, form)
    if linear.weight.dtype != torch.bfloat16:
        return linear
    return PackedLinear(linear.weight.detach(), None, linear.bias, form)


def packing_bytes(layer: nn.Module, to_int8: bool) -> tuple[int, int] | None:
    """What `pack_linear` makes of a layer, and what it takes meanwhile; None if it leaves it."""
    if type(layer) is not nn.Linear or not (to_int8 or layer.weight.dtype == torch.bfloat16):
        return None
    stored = torch.empty_like(layer.weight, dtype=torch.int8, device="meta")
    packed = pack(stored).nbytes if to_int8 else pack(stored).nbytes * torch.bfloat16.itemsize
    quantized = stored.nbytes if to_int8 else 0
    scale_and_bias = 2 * torch.float32.itemsize * layer.out_features
    return packed + scale_and_bias, packed + quantized  # it is padded in one copy, laid in another
