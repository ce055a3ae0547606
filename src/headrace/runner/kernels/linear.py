"""Owns how weights lie in memory and which product reads them; models keep plain nn.Linear.

Three forms: reordered once for oneDNN where the processor multiplies bfloat16 itself; else as
stored, read by our own kernel for few rows and widened tile by tile for many; or int8, likewise.
"""

import torch
from torch import Tensor, nn

from headrace.runner.kernels.few_rows import Operand, product
from headrace.runner.kernels.pointwise import widen_rows
from headrace.runner.kernels.private import (
    can_reorder,
    has_fast_bf16,
    reorder,
    reordered_linear,
)

FEW_ROWS = 160  # up to here one pass over the weights beats widening them first
_TILE_BYTES = 1 << 25  # of widened weights: a larger product is a faster one, and this is memory


class ReorderedLinear(nn.Module):
    """Weights in oneDNN's own order; the plain ones are not kept."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Buffer(reorder(linear.weight.detach()))
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return reordered_linear(x, self.weight, self.bias)


class StoredLinear(nn.Module):
    """Weights [outputs, inputs] as stored: bfloat16, or int8 with one scale per output."""

    def __init__(self, weight: Tensor, scale: Tensor | None, bias: Tensor | None) -> None:
        super().__init__()
        size = len(weight)
        self.weight = nn.Buffer(weight)
        self.scale = nn.Buffer(torch.ones(size) if scale is None else scale)
        self.bias = nn.Buffer(torch.zeros(size) if bias is None else bias.detach().float())
        self._has_bias = bias is not None
        self._operand = Operand(self.weight, self.scale, self.bias)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 2:
            return self(x.flatten(0, -2)).unflatten(0, x.shape[:-1])
        if x.shape[0] <= FEW_ROWS:
            return product(x, self._operand)
        return self._many(x)

    def compile_for_many(self, dtype: torch.dtype) -> None:
        """What long chunks need, and the short ones that are run at load do not."""
        self._many(torch.zeros((1, self.weight.shape[1]), dtype=dtype))

    def _many(self, x: Tensor) -> Tensor:
        keeps = x.dtype == torch.bfloat16 and has_fast_bf16()
        wide = x if keeps else x.float()
        num_outputs, num_inputs = self.weight.shape
        y = wide.new_empty(len(x), num_outputs)
        tile = max(64, _TILE_BYTES // (num_inputs * wide.element_size()))
        scratch = wide.new_empty(min(tile, num_outputs), num_inputs)
        for first in range(0, num_outputs, tile):
            part = slice(first, min(first + tile, num_outputs))
            widened = scratch[: part.stop - first]
            widen_rows(self.weight[part], self.scale[part], widened)
            torch.mm(wide, widened.t(), out=y[:, part])
        if self._has_bias:
            y.add_(self.bias)
        return y.to(x.dtype)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 weight and float32 scale per output: weight = int8 * scale, to the nearest."""
    wide = weight.detach().float()
    scale = wide.abs().amax(dim=1).clamp_(min=1e-12) / 127
    return (wide / scale[:, None]).round_().to(torch.int8), scale


def pack_linears(model: nn.Module, to_int8: bool = False) -> None:
    """Give each linear layer of a CPU model the fastest form here, one at a time."""
    can = has_fast_bf16() and can_reorder()
    packed, dtype = None, torch.float32
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear:
                packed, dtype = _packed(child, to_int8, can), child.weight.dtype
                setattr(parent, name, packed)
    if isinstance(packed, StoredLinear):
        packed.compile_for_many(dtype)


def _packed(linear: nn.Linear, to_int8: bool, can_reorder_here: bool) -> nn.Module:
    if to_int8:
        return StoredLinear(*quantize(linear.weight), linear.bias)
    if linear.weight.dtype != torch.bfloat16:
        return linear
    if can_reorder_here:
        return ReorderedLinear(linear)
    if has_fast_bf16():
        return linear
    return StoredLinear(linear.weight.detach(), None, linear.bias)


def relative_loss(weight: Tensor) -> float:
    """Root of the mean square error that int8 makes, relative to the weights' own size."""
    stored, scale = quantize(weight)
    error = stored * scale[:, None] - weight.float()
    return float(error.norm() / weight.float().norm())
