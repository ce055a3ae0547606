"""What a model's weights will take in memory, worked out before a value of them is read."""

from typing import NamedTuple

import torch
from torch import nn

from headrace.checkpoints.headers import read_headers
from headrace.checkpoints.spec import ModelSpec
from headrace.checkpoints.weights import loading_order
from headrace.models.registry import family
from headrace.runner.kernels.linear import packing_bytes


class Footprint(NamedTuple):
    """Bytes of the weights: once they are loaded, and at the worst moment until then."""

    held: int
    peak: int

    def __str__(self) -> str:
        loading = f", {self.peak >> 20} MiB while loading" if self.peak > self.held else ""
        return f"{self.held >> 20} MiB{loading}"


def footprint(spec: ModelSpec, dtype: torch.dtype, form: str, to_int8: bool) -> Footprint:
    """`form` is that of the kernels; plain is every model that is not computed by ours."""
    if form == "plain":  # each tensor once, as it is
        needed = sum(header.num_values for header in read_headers(spec).values()) * dtype.itemsize
        return Footprint(needed, needed)
    make = family(spec.architecture)
    with torch.device("meta"):
        model = make(make.read(spec.config)).to(dtype)
    return _packed_one_by_one(model, to_int8)


def _packed_one_by_one(model: nn.Module, to_int8: bool) -> Footprint:
    """As `load_weights` goes: a linear layer is packed as soon as all of it is there."""
    order = loading_order(model)
    shared = {name for names in order if len(names) > 1 for name in names}
    missing = {name for names in order for name in names}
    held = peak = 0
    for names in order:
        held += model.get_parameter(names[0]).nbytes
        missing.difference_update(names)
        for path in [name.rpartition(".")[0] for name in names]:
            layer = model.get_submodule(path)
            own = {f"{path}.{name}": p.nbytes for name, p in layer.named_parameters(recurse=False)}
            if not missing.isdisjoint(own) or (packing := packing_bytes(layer, to_int8)) is None:
                continue
            packed, beside = packing
            peak = max(peak, held + packed + beside)
            held += packed - sum(own[name] for name in own.keys() - shared)
        peak = max(peak, held)
    return Footprint(held, peak)
