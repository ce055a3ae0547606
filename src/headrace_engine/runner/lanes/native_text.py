"""Runs native models, with all chunks of a step in one packed forward over KV blocks."""

from array import array
from collections.abc import Callable, Sequence
from copy import copy as shallow_copy
from typing import Any

import torch
from torch import Tensor, nn

from headrace_common.cache import ModelCache, bytes_per_position, bytes_per_slot
from headrace_common.checkpoints.headers import TensorHeader
from headrace_common.checkpoints.spec import ModelSpec
from headrace_common.layout import MemoryLayout
from headrace_common.messages import InstructionSet, LaneFacts
from headrace_common.plan import BlockCopy, Chunk, SlotCopy
from headrace_engine.models import layers
from headrace_engine.models.experts import RoutedMLP
from headrace_engine.models.gemma4 import GeluExperts
from headrace_engine.models.gpt_oss import GptOssExperts
from headrace_engine.models.registry import family, has_head
from headrace_engine.models.step import Step
from headrace_engine.runner.adapters import Site, sites_of
from headrace_engine.runner.attention import Attention
from headrace_engine.runner.batched_attention import plain_attention
from headrace_engine.runner.footprint import is_expert
from headrace_engine.runner.inputs import Batch, pack
from headrace_engine.runner.lanes.lane import LaneOptions, LaneTraits
from headrace_engine.runner.mapped_file import MappedFile
from headrace_engine.runner.probe import release_freed_memory
from headrace_engine.runner.storage import CacheStorage
from headrace_engine.weights.gguf_groups import Groups
from headrace_engine.weights.weights import LayerConverter, group_schemes, load_weights
from headrace_kernels import (
    CapturedForward,
    CpuAttention,
    pack_linear,
    prepare,
)

_LAYERS = {
    layers.RMSNorm: "norm",
    layers.UnitNorm: "unit-norm",
    layers.ShiftedNorm: "shifted-norm",
    layers.GatedNorm: "gated-norm",
    layers.SigmoidGate: "sigmoid-gate",
    layers.Rotary: "rotary",
    layers.GatedMLP: "gated-mlp",
    layers.GeluMLP: "gelu-mlp",
    layers.ClampedMLP: "clamped-mlp",
    RoutedMLP: "routed-mlp",
    GptOssExperts: "routed-mlp",
    GeluExperts: "routed-mlp",
    layers.Convolution: "convolution",
    layers.DeltaGates: "delta-gates",
}
"""The kinds of layers that kernels compute, by the class of the layer."""
# The distance between snapshots of states, in positions, rounded up to a multiple of the block
# size.
_SNAPSHOT_EVERY = 1024


class NativeText:
    traits = LaneTraits("native-text", has_kernels=True, takes_adapters=True)

    def __init__(
        self, spec: ModelSpec, dtype: torch.dtype, device: torch.device, options: LaneOptions
    ) -> None:
        self._model = _without_weights(spec)
        if not has_head(spec.architecture):
            del self._model.head
        tasks = ("generate", "embed") if has_head(spec.architecture) else ("embed",)
        self.traits = self.traits.with_changes(
            tasks=tasks, vector_size=self._model.embed.weight.shape[1]
        )
        self.num_parameters = sum(p.numel() for p in self._model.parameters())
        self._hidden: Callable[[Batch], Tensor]
        # The hidden states of the last forward. Lanes from `adapted` share the list.
        self._last = [torch.empty(0)]
        self.spec, self.device, self.dtype = spec, device, dtype
        self._instructions, self._kv_cache_dtype = options.instructions, options.kv_cache_dtype
        self.weight_bytes = load_model(self._model, spec, dtype, device, options)

    @staticmethod
    def cache_of(spec: ModelSpec) -> ModelCache:
        return _without_weights(spec).cache

    @staticmethod
    def layer_kinds(spec: ModelSpec) -> frozenset[str]:
        """Return the kinds of layers in this model that kernels compute (names in `_LAYERS`)."""
        types = {type(layer) for layer in _without_weights(spec).modules()}
        return frozenset(_LAYERS[it] for it in types & _LAYERS.keys())

    def layout(
        self, free_bytes: int, max_num_seqs: int, max_positions: int, block_size: int
    ) -> MemoryLayout:
        cache: ModelCache = self._model.cache
        size = bytes_per_position(cache, self.dtype.itemsize, self._kv_cache_dtype)
        block_bytes = block_size * size
        num_slots = num_snapshots = 0
        if slot_bytes := bytes_per_slot(cache, self.dtype.itemsize):
            num_slots, num_snapshots = _share_slots(free_bytes // 2 // slot_bytes, max_num_seqs)
            free_bytes = max(0, free_bytes - (num_slots + num_snapshots) * slot_bytes)
            max_num_seqs = num_slots
        wanted = max_num_seqs * -(-max_positions // block_size)
        num_blocks = min(wanted, free_bytes // block_bytes)
        return MemoryLayout(
            block_size=block_size,
            num_blocks=num_blocks,
            num_slots=num_slots,
            num_snapshots=num_snapshots,
            snapshot_every=-(-_SNAPSHOT_EVERY // block_size) * block_size,
            max_positions=min(max_positions, num_blocks * block_size),
        )

    @property
    def storage(self) -> CacheStorage | None:
        return self._storage if self.device.type == "cpu" else None

    def open(self, layout: MemoryLayout) -> None:
        self._storage = CacheStorage(
            self._model.cache, layout, self.dtype, self.device, self._kv_cache_dtype
        )
        self._attention: Attention
        self._table_width = -(-layout.max_positions // layout.block_size)
        self._attention = attention_of(self._storage, self._model.sinks, self._instructions)
        if self._instructions == "plain":
            self._hidden = self._forward
            facts = LaneFacts(mask="lazy-prefix", encoder=self.traits.facts.encoder)
            self.traits = self.traits.with_changes(facts=facts)
            return
        self._hidden = self._captured(self._forward)

    def _captured(self, forward: Callable[[Batch], Tensor]) -> Callable[[Batch], Tensor]:
        if self._instructions == "plain":
            return forward
        return CapturedForward(forward, self._table_width)

    def forward(self, chunks: Sequence[Chunk], token_ids: Sequence["array[int]"]) -> Tensor:
        batch = pack(chunks, token_ids, self._storage.block_size, self.device)
        return self._rows(batch, self._hidden(batch))

    def _rows(self, batch: Batch, hidden: Tensor) -> Tensor:
        self._last[0] = hidden
        return hidden[batch.rows]

    @property
    def last_hidden(self) -> Tensor:
        """Return the hidden state of each token of the last forward, until the next forward.

        There may be more rows than tokens.
        """
        return self._last[0]

    @property
    def has_kernels(self) -> bool:
        return self._instructions != "plain"

    def sites(self) -> dict[str, Site]:
        return sites_of(self._model, self._model.weights, self.spec)

    def adapted(self, adapt: Callable[[Step], Step]) -> "NativeText":
        """Return a lane with the same model and memory that applies `adapt` to each step."""
        twin = shallow_copy(self)
        twin._attention = _AdaptedAttention(self._attention, adapt)
        twin._hidden = twin._captured(twin._forward)
        return twin

    def _forward(self, batch: Batch) -> Tensor:
        """Return the hidden states [tokens, hidden]."""
        return self._model(batch.token_ids, self._attention.step(batch))

    def embed(self, token_ids: Tensor) -> Tensor:
        embedded: Tensor = self._model.embed(token_ids)
        return embedded

    def logits(self, rows: Tensor) -> Tensor:
        logits: Tensor = self._model.logits(rows)
        return logits

    def copy(self, blocks: Sequence[BlockCopy], slots: Sequence[SlotCopy]) -> None:
        for copy in blocks:
            self._storage.copy_block(copy.source, copy.target)
        for each in slots:
            self._storage.copy_slot(each.source, each.target)


class _AdaptedAttention:
    def __init__(self, attention: Attention, adapt: Callable[[Step], Step]) -> None:
        self._attention, self._adapt = attention, adapt

    def step(self, batch: Batch) -> Step:
        return self._adapt(self._attention.step(batch))


def load_model(
    model: Any,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    options: LaneOptions,
    headers: dict[str, TensorHeader] | None = None,
) -> int:
    """Load the weights of a model on the meta device; return their bytes in memory.

    With kernels, the layers are packed and replaced by their fast versions. `headers` has the
    tensors to load; by default, these are the tensors of the text side.
    """
    if options.instructions == "plain":
        load_weights(model, model.weights, spec, dtype, device, headers=headers)
        return _weight_bytes(model)
    on_disk = MappedFile(options.mapped_bytes) if options.mapped_bytes else None
    schemes = group_schemes(model, model.weights, spec) if options.quantize == "own" else {}

    def pack(path: str, groups: Groups | None) -> None:
        place = {"place": on_disk.store} if on_disk is not None and is_expert(path) else {}
        pack_linear(model, path, groups, options.quantize, options.instructions, **place)
        release_freed_memory()

    converter = LayerConverter(pack, schemes)
    load_weights(model, model.weights, spec, dtype, device, converter, headers)
    prepare(model, _LAYERS)
    return _weight_bytes(model) - (on_disk.num_bytes if on_disk else 0)


def attention_of(
    storage: CacheStorage, sinks: Sequence[Tensor], instructions: InstructionSet
) -> Attention:
    """Return the attention over a cache; with the instructions "plain", it uses torch."""
    if instructions == "plain":
        return plain_attention(storage, sinks)
    windows = [layer.window for layer in storage.cache]
    return CpuAttention(storage, windows, sinks, instructions)


def _without_weights(spec: ModelSpec) -> Any:
    model_class = family(spec.architecture)
    with torch.device("meta"):
        return model_class(model_class.read(spec.config))


def _weight_bytes(model: nn.Module) -> int:
    """Return the current bytes of the weights; tied weights count once."""
    sizes = {tensor.data_ptr(): tensor.nbytes for tensor in model.state_dict().values()}
    return sum(sizes.values())


def _share_slots(num_all: int, max_num_seqs: int) -> tuple[int, int]:
    """Divide `num_all` slots: at most half for sequences, then up to two snapshots per sequence."""
    num_slots = max(1, min(max_num_seqs, num_all // 2))
    return num_slots, max(0, min(num_all - num_slots, 2 * num_slots))
