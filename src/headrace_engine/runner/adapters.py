"""Loads LoRA adapters, and adds their changes to the linear layers of a loaded model."""

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

# The maximum number of adapters that one model can have loaded.
MAX_ADAPTERS = 64
ADAPTABLE = re.compile(
    r"layers\.\d+\.(attention|delta_net|mlp)\.(qkv|qk|q|out|project|gate_up|down)"
)
"""The layers of native models that `Step.linear` computes for all rows of a step."""
# Steps of up to this many tokens share one fixed array of adapter slots, because a captured
# forward pass reads the same array each time.
_SMALL_STEP = 256
_COMMON_RANK = 64


class Site(NamedTuple):
    """A linear layer that adapters can change, and the checkpoint modules that it combines."""

    layer: nn.Module
    inputs: int
    # For each module, the index of its first output and its number of outputs.
    parts: Mapping[str, tuple[int, int]]


class AdaptableLane(Protocol):
    """The part of a native lane that `Adapters` uses."""

    spec: ModelSpec
    device: torch.device
    dtype: torch.dtype

    @property
    def has_kernels(self) -> bool:
        """Return whether Headrace's kernels compute matrix products."""

    def sites(self) -> dict[str, Site]: ...

    def adapted(self, adapt: Callable[[Step], Step]) -> "AdaptableLane":
        """Return a lane with the same model and memory that applies `adapt` to each step."""

    def forward(self, chunks: Sequence[Chunk], token_ids: Sequence["array[int]"]) -> Tensor: ...


def sites_of(model: nn.Module, table: Table, spec: ModelSpec) -> dict[str, Site]:
    """Return the layers of a loaded model that adapters can change, by path in the model."""
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
    """An adapter in memory; `parts` maps the path of a layer to the changes of that layer."""

    adapter: Adapter
    parts: dict[str, list[LowRankPart]]
    num_bytes: int

    @property
    def widest(self) -> int:
        """Return the largest sum of ranks at one layer."""
        return max(sum(len(part.down) for part in parts) for parts in self.parts.values())


class Adapters:
    """Holds the adapters of one lane.

    `read` may be called while a step runs. All other methods may be called only between steps.
    """

    def __init__(self, lane: AdaptableLane) -> None:
        self._lane = lane
        self._sites = lane.sites()
        self._layers = {path: LowRankLayer(MAX_ADAPTERS) for path in self._sites}
        # The slot of each loaded adapter, by the adapter's fingerprint.
        self._slots: dict[str, int] = {}
        self._rows = SlotRows(_SMALL_STEP)
        self._small, self._width = self._rows, 0
        # The paths of layers that an adapter has changed so far.
        self._changed: set[str] = set()
        self._adapted: AdaptableLane

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, fingerprint: str) -> bool:
        return fingerprint in self._slots

    def read(self, adapter: Adapter) -> ReadAdapter:
        """Read an adapter and compile its kernels.

        Raises ModelError if the adapter does not match the model, does not fit into free memory,
        or has changed files.
        """
        files = read_adapter(Path(adapter.path), self._lane.spec.architecture)
        by_path = self._by_path(adapter.name, files)
        num_bytes = files.num_values * self._lane.dtype.itemsize
        free = free_bytes(self._lane.device)
        # While an adapter is read, memory holds both the stored and the converted tensors.
        if 2 * num_bytes > free:
            raise ModelError(
                f"The adapter {adapter.name} takes {num_bytes >> 20} MiB, and twice as much while "
                f"it is read, but only {free >> 20} MiB are free; unload another adapter.",
                "model_too_large",
            )
        if (found := fingerprint_of(files)) != adapter.fingerprint:
            raise ModelError(
                f"The files of adapter {adapter.name} have changed since it was loaded (their "
                f"fingerprint is now {found}); unload the adapter and load it again.",
                "model_changed",
            )
        with AdapterTensors(files, self._lane.spec) as tensors:
            parts = {
                path: [
                    LowRankPart(
                        first, *(it.to(self._lane.device) for it in tensors.read_factors(module))
                    )
                    for module, first in modules
                ]
                for path, modules in by_path.items()
            }
        if self._lane.has_kernels:
            compile_low_rank(self._lane.dtype)
        return ReadAdapter(adapter, parts, num_bytes)

    def _by_path(self, name: str, files: AdapterFiles) -> dict[str, list[tuple[str, int]]]:
        """Return the adapter's modules, by the path of the layer that the modules change.

        Each module comes with the index of its first output in the layer.
        """
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
                f"The adapter {name} changes {module} (rank {left[module].rank}), which is not "
                f"supported; adapters of {self._lane.spec.architecture} can change only "
                f"{', '.join(_kinds(self._sites.values()))}."
            )
        if not found:
            raise ModelError(f"The adapter {name} has no tensors; save the adapter again.")
        return found

    def put(self, read: ReadAdapter) -> None:
        """Let sequences use an adapter from the next step on.

        Raises ModelError if MAX_ADAPTERS adapters are loaded already.
        """
        free = set(range(MAX_ADAPTERS)) - set(self._slots.values())
        if read.adapter.fingerprint in self._slots:
            return
        if not free:
            raise ModelError(
                f"{MAX_ADAPTERS} adapters are loaded, and this is the limit; unload an adapter."
            )
        slot = min(free)
        try:
            for path, parts in read.parts.items():
                self._layers[path].put(slot, parts, self._lane.dtype)
        # If memory is short, no part of the adapter may stay in the slot.
        except BaseException:
            self._clear(slot)
            raise
        self._slots[read.adapter.fingerprint] = slot
        width = max(self._width, read.widest, _COMMON_RANK * max(map(len, read.parts.values())))
        if width > self._width or not self._changed.issuperset(read.parts):
            self._width = width
            self._changed |= read.parts.keys()
            layers = {self._sites[path].layer: self._layers[path] for path in self._changed}
            self._adapted = self._lane.adapted(lambda step: AdaptedStep(step, layers, self._add))

    def drop(self, fingerprint: str) -> None:
        """Forget an adapter that no sequence uses any more."""
        if (slot := self._slots.pop(fingerprint, None)) is not None:
            self._clear(slot)

    def _clear(self, slot: int) -> None:
        for layer in self._layers.values():
            layer.clear(slot)

    def forward(self, chunks: Sequence[Chunk], token_ids: Sequence["array[int]"]) -> Tensor:
        """Run the lane's forward, with each chunk's adapter applied to the chunk's rows."""
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
    """A step whose linear layers add the changes of adapters; everything else is unchanged."""

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
            f"{factors.rank}); the model has {expected[0]} and {expected[1]} there. Use an adapter "
            "that was trained on this model."
        )


def _kinds(sites: Iterable[Site]) -> list[str]:
    return sorted({module.rpartition(".")[2] for site in sites for module in site.parts})
