"""Owns how weights lie in memory: packed once for our own product; models keep plain nn.Linear."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from headrace_kernels.groups import (
    INT4,
    GroupedWeights,
    Scheme,
    kernels_of,
    pack_groups,
    packed_bytes,
    quantize_groups,
)
from headrace_kernels.instruction_sets import InstructionSet
from headrace_kernels.product import Operand, kernels_for, num_packed, pack, product

PlainScheme = tuple[int, int, bool, bool]
"""How values in groups are stored: their bits, the size of a group, whether it has minima, and
whether they are MXFP4."""
PlainGroups = tuple[PlainScheme, Tensor, Tensor, Tensor]
"""A scheme; q int8 [outputs, inputs]; scale and minimum float16 [outputs, groups]. MXFP4: codes,
and scales uint8."""

Quantize = Literal["none", "int8", "int4", "own"]
"""How weights of linear layers are kept: as they are, in 8 bits with a scale per output, in 4 bits
with scales and minima per group, or as the model's file has them."""

HEAD = "head"  # the path of the output layer in every native family
_EXACT = ("router", "shared_gate")  # layers that are never quantized: tokens would go elsewhere
_OUTPUTS_AT_ONCE = 256  # of float32 while quantizing: a whole matrix may be a tenth of the model


Place = Callable[[Tensor], Tensor]
"""Puts packed weights where they are to stay, and returns them there."""


def in_memory(packed: Tensor) -> Tensor:
    return packed


class PackedLinear(nn.Module):
    """Weights [outputs, inputs] packed: bfloat16, or int8 with one scale per output."""

    def __init__(
        self,
        weight: Tensor,
        scale: Tensor | None,
        bias: Tensor | None,
        instructions: InstructionSet | None = None,
        place: Place = in_memory,
    ) -> None:
        super().__init__()
        size, num_inputs = weight.shape
        self.weight = nn.Buffer(place(pack(weight)))
        self.scale = nn.Buffer(place(torch.ones(size) if scale is None else scale))
        self.bias = nn.Buffer(place(torch.zeros(size) if bias is None else bias.detach().float()))
        kernels = kernels_for(instructions, num_inputs, weight.dtype)
        self.operand = Operand(self.weight, num_inputs, self.scale, self.bias, kernels)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 2:
            return self(x.flatten(0, -2)).unflatten(0, x.shape[:-1])
        return product(x, self.operand)


def quantize_outputs(weight: Tensor) -> tuple[Tensor, Tensor]:
    """int8 weight and float32 scale per output: weight = int8 * scale, to the nearest."""
    stored = torch.empty(weight.shape, dtype=torch.int8)
    scale = torch.empty(len(weight))
    for first in range(0, len(weight), _OUTPUTS_AT_ONCE):
        part = slice(first, first + _OUTPUTS_AT_ONCE)
        wide = weight.detach()[part].float()
        scale[part] = wide.abs().amax(dim=1).clamp_(min=1e-12) / 127
        stored[part] = (wide / scale[part, None]).round_()
    return stored, scale


class GroupedLinear(nn.Module):
    """Weights [outputs, inputs] in groups, as they are in a file or rounded to 4 bits."""

    def __init__(
        self,
        groups: GroupedWeights,
        bias: Tensor | None,
        instructions: InstructionSet | None = None,
        place: Place = in_memory,
    ) -> None:
        super().__init__()
        size, num_inputs = groups.q.shape
        self.scheme = groups.scheme
        self.weight = nn.Buffer(place(pack_groups(groups)))
        self.scale = nn.Buffer(place(torch.ones(size)))
        self.bias = nn.Buffer(place(torch.zeros(size) if bias is None else bias.detach().float()))
        kernels = kernels_of(groups.scheme, num_inputs, instructions)
        self.operand = Operand(self.weight, num_inputs, self.scale, self.bias, kernels)

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 2:
            return self(x.flatten(0, -2)).unflatten(0, x.shape[:-1])
        return product(x, self.operand)


def pack_linear(
    model: nn.Module,
    path: str,
    groups: PlainGroups | None = None,
    quantize: Quantize = "none",
    instructions: InstructionSet | None = None,
    place: Place = in_memory,
) -> None:
    """Give the module at `path` of a CPU model the fastest kernels here, if it is a linear layer.

    `groups`, if there are any, are its weights. Float32 weights stay as they are, unless quantized.
    `place` says where packed weights stay: in a file that is mapped, say.
    """
    linear = model.get_submodule(path)
    if isinstance(linear, nn.Linear):
        parent, _, name = path.rpartition(".")
        kind = _quantize_of(path, quantize)
        packed = _packed(linear, groups, kind, instructions, place)
        setattr(model.get_submodule(parent), name, packed)


def _quantize_of(path: str, quantize: Quantize) -> Quantize:
    """The quantization of one linear layer; in int4 models the head is int8, as it costs most."""
    if path.rpartition(".")[2] in _EXACT:
        return "none"
    return "int8" if quantize == "int4" and path == HEAD else quantize


def _packed(
    linear: nn.Linear,
    groups: PlainGroups | None,
    quantize: Quantize,
    instructions: InstructionSet | None,
    place: Place,
) -> nn.Module:
    how: Any = linear.bias, instructions, place
    if quantize == "int4":
        return GroupedLinear(quantize_groups(linear.weight), *how)
    if groups is not None:
        return GroupedLinear(GroupedWeights(Scheme(*groups[0]), *groups[1:]), *how)
    if quantize == "int8":
        return PackedLinear(*quantize_outputs(linear.weight), *how)
    if linear.weight.dtype != torch.bfloat16:
        return linear
    return PackedLinear(linear.weight.detach(), None, *how)


def packing_bytes(
    model: nn.Module, path: str, scheme: PlainScheme | None = None, quantize: Quantize = "none"
) -> tuple[int, int] | None:
    """Bytes of a layer once `pack_linear` is done, and meanwhile; None if it leaves the layer.

    `scheme`, if there is one, is that of its groups.
    """
    layer, quantize = model.get_submodule(path), _quantize_of(path, quantize)
    if not isinstance(layer, nn.Linear):
        return None
    outputs, inputs = layer.out_features, layer.in_features
    scale_and_bias = 2 * torch.float32.itemsize * outputs
    if kept := INT4 if quantize == "int4" else scheme and Scheme(*scheme):
        beside = outputs * (inputs + 2 * torch.float16.itemsize * -(-inputs // kept.size))
        return packed_bytes(kept, outputs, inputs) + scale_and_bias, beside
    if quantize != "int8" and layer.weight.dtype != torch.bfloat16:
        return None
    is_int8 = quantize == "int8"
    kind = torch.int8 if is_int8 else torch.bfloat16
    packed = num_packed(outputs, inputs) * kind.itemsize
    beside = outputs * inputs if is_int8 else 0
    return packed + scale_and_bias, packed + beside  # it is padded in one copy, laid in another
