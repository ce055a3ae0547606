"""Adapters (LoRA) of a loaded model: which layers they fit, and what they add in each step."""

import re
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from headrace_common.adapter import Adapter
from headrace_common.checkpoints.adapters import (
    AdapterFiles,
    FactorHeaders,
    fingerprint_of,
    read_adapter,
)
from headrace_common.checkpoints.spec import ModelSpec
from headrace_common.errors import ModelError
from headrace_common.plan import Chunk
from headrace_engine.models.step import Step
from headrace_engine.runner.probe import free_bytes
from headrace_engine.weights.adapter_weights import AdapterTensors
from headrace_engine.weights.weights import Table, sources_of, text_headers
from headrace_kernels import (
    LowRankLayer,
    LowRankPart,
    SlotRows,
    add_low_rank,
    add_low_rank_by_torch,
    compile_low_rank,
)

MOST_ADAPTERS = 64  # of one model at once
ADAPTABLE = re.compile(r"layers\.\d+\.(attention|delta_net|mlp)\.(qkv|out|project|gate_up|down)")
"""The layers of a native family that are computed by `Step.linear` of whole steps."""
_SMALL_STEP = 256  # tokens, for which there are fixed books: what is replayed reads them
_COMMON_RANK = 64


class Site(NamedTuple):
    """A linear layer that can be adapted, and the checkpoint's modules that it is stacked of."""

    layer: nn.Module
    inputs: int
    parts: Mapping[str, tuple[int, int]]  # the first of its outputs, and their number


class AdaptableLane(Protocol):
    """The part of a native lane that adapters need, beside `forward`."""

    spec: ModelSpec
    device: torch.device
    dtype: torch.dtype

    @property
    def has_kernels(self) -> bool:
        """Whether products are computed by kernels of ours."""
        ...

    def sites(self) -> dict[str, Site]: ...

    def adapted(self, adapt: Callable[[Step], Step]) -> "AdaptableLane":
        """The same model over the same memory, its steps as `adapt` changes them."""
        ...

    def forward(self, chunks: Sequence[Chunk], token_ids: Sequence["array[int]"]) -> Tensor: ...


def sites_of(model: nn.Module, table: Table, spec: ModelSpec) -> dict[str, Site]:
    """The sites of a loaded model, by the paths of its layers."""
    headers = text_headers(spec)
    found = {}
    for path, layer in model.named_modules():
        if not ADAPTABLE.fullmatch(path):
            continue
        first, parts = 0, {}
        for source in sources_of(f"{path}.weight", table):
            outputs, inputs = headers[source].shape
            parts[source.removesuffix(".weight")] = first, outputs
            first += outputs
        found[path] = Site(layer, inputs, parts)
    return found


class ReadAdapter(NamedTuple):
    """An adapter in memory, by the paths of the layers that it changes."""

    adapter: Adapter
    parts: dict[str, list[LowRankPart]]
    num_bytes: int

    @property
    def widest(self) -> int:
        """The largest sum of ranks at one layer."""
        return max(sum(len(part.down) for part in parts) for parts in self.parts.values())


class Adapters:
    """The adapters of one lane. `read` may run beside steps, all else between them."""

    def __init__(self, lane: AdaptableLane) -> None:
        self._lane = lane
        self._sites = lane.sites()
        self._layers = {path: LowRankLayer(MOST_ADAPTERS) for path in self._sites}
        self._slots: dict[str, int] = {}  # by fingerprint
        self._rows = SlotRows(_SMALL_STEP)
        self._small, self._width = self._rows, 0
        self._changed: set[str] = set()  # paths of layers that any of them has changed
        self._adapted: AdaptableLane

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, fingerprint: str) -> bool:
        return fingerprint in self._slots

    def read(self, adapter: Adapter) -> ReadAdapter:
        """Reads one; ModelError if it is not fit, or there is no room. Compiles what it needs."""
        files = read_adapter(Path(adapter.path), self._lane.spec.architecture)
        by_path = self._by_path(adapter.name, files)
        num_bytes = files.num_values * self._lane.dtype.itemsize
        free = free_bytes(self._lane.device)
        if 2 * num_bytes > free:  # as it is read, and as it is kept
            raise ModelError(
                f"The adapter {adapter.name} takes {num_bytes >> 20} MiB, twice that while it is "
                f"read, and {free >> 20} MiB are free; unload another one.",
                "model_too_large",
            )
        if (found := fingerprint_of(files)) != adapter.fingerprint:
            raise ModelError(
                f"The files of adapter {adapter.name} have changed since it was loaded (now "
                f"{found}); unload it, and load it again.",
                "model_changed",
            )
        with AdapterTensors(files, self._lane.spec) as tensors:
            parts = {
                path: [
                    LowRankPart(first, *(it.to(self._lane.device) for it in tensors.pair(module)))
                    for module, first in modules
                ]
                for path, modules in by_path.items()
            }
        if self._lane.has_kernels:
            compile_low_rank(self._lane.dtype)
        return ReadAdapter(adapter, parts, num_bytes)

    def _by_path(self, name: str, files: AdapterFiles) -> dict[str, list[tuple[str, int]]]:
        """The modules that it changes at each path, with the first of their outputs, in order."""
        found: dict[str, list[tuple[str, int]]] = {}
        left = dict(files.factors)
        for path, site in self._sites.items():
            for module, (first, outputs) in site.parts.items():
                if (factors := left.pop(module, None)) is not None:
                    _check_fits(name, module, factors, (site.inputs, outputs))
                    found.setdefault(path, []).append((module, first))
        if left:
            module = min(left)
            raise ModelError(
                f"The adapter {name} changes {module}, of rank {left[module].rank}; of "
                f"{self._lane.spec.architecture} only these are changed here: "
                f"{', '.join(_kinds(self._sites.values()))}."
            )
        if not found:
            raise ModelError(f"The adapter {name} has no tensors; save it again.")
        return found

    def put(self, read: ReadAdapter) -> None:
        """Lets sequences use it from the next step on; ModelError if there are too many."""
        free = set(range(MOST_ADAPTERS)) - set(self._slots.values())
        if read.adapter.fingerprint in self._slots:
            return
        if not free:
            raise ModelError(f"{MOST_ADAPTERS} adapters are loaded already; unload one.")
        slot = self._slots[read.adapter.fingerprint] = min(free)
        for path, parts in read.parts.items():
            self._layers[path].put(slot, parts, self._lane.dtype)
        width = max(self._width, read.widest, _COMMON_RANK * max(map(len, read.parts.values())))
        if width > self._width or not self._changed.issuperset(read.parts):
            self._width = width
            self._changed |= read.parts.keys()
            layers = {self._sites[path].layer: self._layers[path] for path in self._changed}
            self._adapted = self._lane.adapted(lambda step: AdaptedStep(step, layers, self._add))

    def drop(self, fingerprint: str) -> None:
        """No sequence uses it any more, or ever will."""
        if (slot := self._slots.pop(fingerprint, None)) is None:
            return
        for layer in self._layers.values():
            layer.clear(slot)

    def forward(self, chunks: Sequence[Chunk], token_ids: Sequence["array[int]"]) -> Tensor:
        """The lane's, where rows of a chunk are changed by the chunk's adapter."""
        if not any(chunk.adapter for chunk in chunks):
            return self._lane.forward(chunks, token_ids)
        slots = [self._slots[chunk.adapter] if chunk.adapter else -1 for chunk in chunks]
        rows = np.repeat(np.array(slots, np.int32), [chunk.length for chunk in chunks])
        self._rows = self._small if len(rows) <= _SMALL_STEP else SlotRows(len(rows))
        self._rows.fill(rows)
        return self._adapted.forward(chunks, token_ids)

    def _add(self, x: Tensor, y: Tensor, layer: LowRankLayer) -> None:
        if self._lane.has_kernels:
            add_low_rank(x, y, layer, self._rows, self._width)
        else:
            add_low_rank_by_torch(x, y, layer, self._rows)


class AdaptedStep:
    """A step whose linear layers add what adapters change; all else is the step's own."""

    def __init__(
        self,
        step: Step,
        layers: Mapping[nn.Module, LowRankLayer],
        add: Callable[[Tensor, Tensor, LowRankLayer], None],
    ) -> None:
        self.positions = step.positions
        self.attend, self.convolve, self.delta_rule = step.attend, step.convolve, step.delta_rule
        self._linear = step.linear
        self._layers, self._add = layers, add

    def linear(self, layer: nn.Module, x: Tensor) -> Tensor:
        y = self._linear(layer, x)
        if (own := self._layers.get(layer)) is not None:
            self._add(x, y, own)
        return y


def _check_fits(name: str, module: str, factors: FactorHeaders, expected: tuple[int, int]) -> None:
    found = factors.down.shape[1], factors.up.shape[0]
    if found != expected:
        raise ModelError(
            f"The adapter {name} has {found[0]} inputs and {found[1]} outputs at {module} (rank "
            f"{factors.rank}), and the model {expected[0]} and {expected[1]}; it was made for "
            "another one."
        )


def _kinds(sites: Iterable[Site]) -> list[str]:
    return sorted({module.rpartition(".")[2] for site in sites for module in site.parts})
