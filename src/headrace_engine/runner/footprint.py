"""The memory that a model's weights will take, worked out before any value is read."""

import re
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn

from headrace_common.checkpoints.headers import read_headers, text_side
from headrace_common.checkpoints.spec import ModelSpec
from headrace_common.messages import InstructionSet, Quantize
from headrace_engine.models.registry import family, has_head
from headrace_engine.runner.mapped_file import room_for
from headrace_engine.weights.gguf_groups import GroupScheme
from headrace_engine.weights.weights import group_schemes, loading_order
from headrace_kernels import packing_bytes

_EXPERT = re.compile(r"\.experts\.\d+\.")


class Footprint(NamedTuple):
    """Bytes of the weights: once they are loaded, and at the worst moment until then.

    `mapped`: those of experts that lie in a file instead (mapped_file.py).
    """

    held: int
    peak: int
    mapped: int = 0

    def __str__(self) -> str:
        loading = f", {self.peak >> 20} MiB while loading" if self.peak > self.held else ""
        beside = f" and {self.mapped >> 20} MiB of experts on disk" if self.mapped else ""
        return f"{self.held >> 20} MiB{beside}{loading}"


def is_expert(path: str) -> bool:
    """Whether a layer is of one of many experts, which may be read as they are chosen."""
    return _EXPERT.search(path) is not None


def footprint(
    spec: ModelSpec,
    dtype: torch.dtype,
    instructions: InstructionSet,
    quantize: Quantize,
    maps_experts: bool = False,
) -> Footprint:
    """`instructions` are the kernels'; plain: no kernel of ours computes the model."""
    if instructions == "plain":  # each tensor once, as it is
        headers = text_side(read_headers(spec)).values()
        if quantize == "own":  # or as its file has it
            stored = sum(end - start for start, end in (each.data_offsets for each in headers))
            return Footprint(stored, stored)
        needed = sum(header.num_values for header in headers) * dtype.itemsize
        return Footprint(needed, needed)
    model, schemes = _model(spec)
    kept = schemes if quantize == "own" else {}
    return _packed_one_by_one(model.to(dtype), quantize, kept, maps_experts)


def kept_groups(spec: ModelSpec) -> frozenset[GroupScheme]:
    """The schemes that the files' own groups are kept in."""
    return frozenset(_model(spec)[1].values())


def _model(spec: ModelSpec) -> tuple[nn.Module, dict[str, GroupScheme]]:
    make = family(spec.architecture)
    with torch.device("meta"):
        model = make(make.read(spec.config))
    if not has_head(spec.architecture):
        del model.head
    return model, group_schemes(model, make.weights, spec)


def _packed_one_by_one(
    model: nn.Module,
    quantize: Quantize,
    schemes: Mapping[str, GroupScheme],
    maps_experts: bool,
) -> Footprint:
    """Follows `load_weights`: a linear layer is packed as soon as all of it is there."""
    order = loading_order(model)
    shared = {name for names in order if len(names) > 1 for name in names}
    missing = {name for names in order for name in names}
    held = peak = mapped = 0
    for names in order:
        held += 0 if names[0] in schemes else model.get_parameter(names[0]).nbytes
        missing.difference_update(names)
        for path in [name.rpartition(".")[0] for name in names]:
            layer, kept = model.get_submodule(path), schemes.get(f"{path}.weight")
            own = {f"{path}.{name}": p.nbytes for name, p in layer.named_parameters(recurse=False)}
            packing = packing_bytes(model, path, kept, quantize)
            if not missing.isdisjoint(own) or packing is None:
                continue
            packed, beside = packing
            peak = max(peak, held + packed + beside)
            held += packed - sum(own[name] for name in own.keys() - shared - schemes.keys())
            if maps_experts and is_expert(path):
                held, mapped = held - packed, mapped + room_for(packed)
        peak = max(peak, held)
    return Footprint(held, peak, mapped)
