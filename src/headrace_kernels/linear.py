"""Replaces a model's nn.Linear layers with layers whose weights are packed once for the kernels."""

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
"""How grouped weights are stored: (bits, inputs in a group, has minima, is MXFP4)."""
PlainGroups = tuple[PlainScheme, Tensor, Tensor, Tensor]
"""A scheme; q int8 [outputs, inputs]; scale and minimum float16 [outputs, groups].

For MXFP4, q holds codes and the scales are uint8.
"""

Quantize = Literal["none", "int8", "int4", "own"]
"""How the weights of linear layers are stored.

none: unchanged. int8: 8 bits, a scale for each output. int4: 4 bits, a scale and a minimum for
each group. own: as in the model's file.
"""

# The path of the output layer in every native model family.
HEAD = "head"
# Layers that are never quantized: a rounding error could send tokens to other experts.
_EXACT = ("router", "shared_gate")
# How many outputs are widened to float32 at a time. A whole matrix may be a tenth of the model.
_OUTPUTS_AT_ONCE = 256


StoreWeights = Callable[[Tensor], Tensor]
"""Stores packed weights in their final place, and returns the stored tensor."""


def in_memory(packed: Tensor) -> Tensor:
    return packed


class PackedLinear(nn.Module):
    """A linear layer with packed weights: bfloat16, or int8 with one scale for each output.

    weight: [outputs, inputs]
    """

    def __init__(
        self,
        weight: Tensor,
        scale: Tensor | None,
        bias: Tensor | None,
        instructions: InstructionSet | None = None,
        place: StoreWeights = in_memory,
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
    """Round weights to int8. Return the rounded weights and a float32 scale for each output.

    weight = int8 * scale
    """
    stored = torch.empty(weight.shape, dtype=torch.int8)
    scale = torch.empty(len(weight))
    for first in range(0, len(weight), _OUTPUTS_AT_ONCE):
        part = slice(first, first + _OUTPUTS_AT_ONCE)
        wide = weight.detach()[part].float()
        scale[part] = wide.abs().amax(dim=1).clamp_(min=1e-12) / 127
        stored[part] = (wide / scale[part, None]).round_()
    return stored, scale


class GroupedLinear(nn.Module):
    """A linear layer with weights in groups, as in the model's file or rounded to 4 bits."""

    def __init__(
        self,
        groups: GroupedWeights,
        bias: Tensor | None,
        instructions: InstructionSet | None = None,
        place: StoreWeights = in_memory,
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
    place: StoreWeights = in_memory,
) -> None:
    """Replace the linear layer at `path` of a CPU model with its fastest version.

    Any other layer stays unchanged.
    groups: the layer's weights, if they are stored in groups.
    place: stores packed weights, for example in a mapped file.
    Float32 weights stay unchanged unless they are quantized.
    """
    linear = model.get_submodule(path)
    if isinstance(linear, nn.Linear):
        parent, _, name = path.rpartition(".")
        kind = _quantize_of(path, quantize)
        packed = _packed(linear, groups, kind, instructions, place)
        setattr(model.get_submodule(parent), name, packed)


def _quantize_of(path: str, quantize: Quantize) -> Quantize:
    """Return the quantization of one linear layer.

    In int4 models the head is int8, because quantizing the head to 4 bits costs the most accuracy.
    """
    if path.rpartition(".")[2] in _EXACT:
        return "none"
    return "int8" if quantize == "int4" and path == HEAD else quantize


def _packed(
    linear: nn.Linear,
    groups: PlainGroups | None,
    quantize: Quantize,
    instructions: InstructionSet | None,
    place: StoreWeights,
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
    """Return a layer's bytes after `pack_linear`, and the extra bytes during packing.

    scheme: the scheme of the layer's weights if they are in groups. Returns None if `pack_linear`
    leaves the layer unchanged.
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
    # Packing pads the matrix in one copy and reorders it in another copy.
    return packed + scale_and_bias, packed + beside
