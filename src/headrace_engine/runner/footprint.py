"""Computes how much memory a model's weights will take, before any weight is read."""

import re
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn

from headrace_common.checkpoints.headers import beside_text, read_headers, text_side
from headrace_common.checkpoints.spec import ModelSpec
from headrace_common.messages import InstructionSet, Quantize
from headrace_engine.models.registry import family, has_head
from headrace_engine.runner.mapped_file import aligned_bytes
from headrace_engine.weights.gguf_groups import GroupScheme
from headrace_engine.weights.weights import group_schemes, loading_order
from headrace_kernels import packing_bytes

_EXPERT = re.compile(r"\.experts\.\d+\.")


class Footprint(NamedTuple):
    """Holds the bytes of the weights in memory: `held` after loading, `peak` while loading.

    `mapped` is the number of bytes of experts that are in a file instead (see mapped_file.py).
    """

    held: int
    peak: int
    mapped: int = 0

    def __str__(self) -> str:
        loading = (
            f", {self.peak >> 20} MiB while loading" if self.peak >> 20 > self.held >> 20 else ""
        )
        beside = f" and {self.mapped >> 20} MiB of experts on disk" if self.mapped else ""
        return f"{self.held >> 20} MiB{beside}{loading}"


def is_expert(path: str) -> bool:
    """Return whether a layer belongs to an expert of a mixture-of-experts model.

    Experts can stay on disk until the router selects them for a token.
    """
    return _EXPERT.search(path) is not None


def footprint(
    spec: ModelSpec,
    dtype: torch.dtype,
    instructions: InstructionSet,
    quantize: Quantize,
    maps_experts: bool = False,
    has_encoder: bool = False,
) -> Footprint:
    """Return the memory of the weights; with instructions "plain", no kernel packs the weights.

    With `has_encoder`, the lane also loads the vision and audio sides, which no kernel packs.
    """
    text = _text_footprint(spec, dtype, instructions, quantize, maps_experts)
    if not has_encoder:
        return text
    beside = beside_text(read_headers(spec)).values()
    # The text side is loaded first.
    held = text.held + sum(header.num_values for header in beside) * dtype.itemsize
    return text._replace(held=held, peak=max(text.peak, held))


def _text_footprint(
    spec: ModelSpec,
    dtype: torch.dtype,
    instructions: InstructionSet,
    quantize: Quantize,
    maps_experts: bool,
) -> Footprint:
    # Without kernels, memory holds each tensor once: in `dtype`, or in the format of the file.
    if instructions == "plain":
        headers = text_side(read_headers(spec)).values()
        if quantize == "own":
            stored = sum(end - start for start, end in (each.data_offsets for each in headers))
            return Footprint(stored, stored)
        needed = sum(header.num_values for header in headers) * dtype.itemsize
        return Footprint(needed, needed)
    model, schemes = _model(spec)
    kept = schemes if quantize == "own" else {}
    return _packed_one_by_one(model.to(dtype), quantize, kept, maps_experts)


def packed_footprint(model: nn.Module, dtype: torch.dtype, quantize: Quantize) -> Footprint:
    """Return the memory for the weights of `model`, which has none yet; all will be packed."""
    return _packed_one_by_one(model.to(dtype), quantize, {}, maps_experts=False)


def kept_groups(spec: ModelSpec) -> frozenset[GroupScheme]:
    """Return the quantization schemes that weights can keep from the model's files."""
    return frozenset(_model(spec)[1].values())


def _model(spec: ModelSpec) -> tuple[nn.Module, dict[str, GroupScheme]]:
    model_class = family(spec.architecture)
    with torch.device("meta"):
        model = model_class(model_class.read(spec.config))
    if not has_head(spec.architecture):
        del model.head
    return model, group_schemes(model, model_class.weights, spec)


def _packed_one_by_one(
    model: nn.Module,
    quantize: Quantize,
    schemes: Mapping[str, GroupScheme],
    maps_experts: bool,
) -> Footprint:
    """Return the memory of weights that are packed one layer after the other.

    The calculation follows `load_weights`, which packs a linear layer as soon as the layer is
    complete. At that time, memory holds everything loaded so far, the layer's packed copy and the
    buffers for packing. The peak is the largest sum of these parts. Afterwards the unpacked copy
    is freed, unless the weight is tied to another weight.
    """
    order = loading_order(model)
    shared = {name for names in order if len(names) > 1 for name in names}
    missing = {name for names in order for name in names}
    held = peak = mapped = 0
    for names in order:
        held += 0 if names[0] in schemes else model.get_parameter(names[0]).nbytes
        missing.difference_update(names)
        for path in [name.rpartition(".")[0] for name in names]:
            layer, kept = model.get_submodule(path), schemes.get(f"{path}.weight")
            sizes = {
                f"{path}.{name}": p.nbytes for name, p in layer.named_parameters(recurse=False)
            }
            packing = packing_bytes(model, path, kept, quantize)
            if not missing.isdisjoint(sizes) or packing is None:
                continue
            packed, beside = packing
            peak = max(peak, held + packed + beside)
            held += packed - sum(sizes[name] for name in sizes.keys() - shared - schemes.keys())
            if maps_experts and is_expert(path):
                held, mapped = held - packed, mapped + aligned_bytes(packed)
        peak = max(peak, held)
    return Footprint(held, peak, mapped)
