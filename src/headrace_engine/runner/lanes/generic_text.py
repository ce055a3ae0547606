"""Runs any causal model of transformers: over KV blocks if possible, else with dense caches."""

import copy as copies
import logging
from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from headrace_common.checkpoints.spec import ModelSpec
from headrace_common.errors import ModelError
from headrace_common.ids import SlotId
from headrace_common.layout import MemoryLayout
from headrace_common.messages import InstructionSet, LaneFacts
from headrace_common.plan import BlockCopy, Chunk, SlotCopy
from headrace_engine.runner.lanes.foreign import (
    FOREIGN_ERRORS,
    TOLERANCE,
    Signature,
    Weights,
    load_pretrained,
    tensor_bytes,
)
from headrace_engine.runner.lanes.generic_blocks import BlockCaches, BlocksUnsupported
from headrace_engine.runner.lanes.lane import LaneOptions, LaneTraits
from headrace_engine.runner.storage import CacheStorage
from headrace_kernels import choose_instructions

logger = logging.getLogger(__name__)

_PROBE_ENDS = (7, 37, 40)
"""The ends of the chunks in which a test prompt is processed.

The last chunk is short. A model that forgets the earlier chunks would have little context left,
and its error would exceed rounding.
"""


class GenericText:
    traits = LaneTraits("generic-text")

    def __init__(
        self, spec: ModelSpec, dtype: torch.dtype, device: torch.device, options: LaneOptions
    ) -> None:
        """Load the model. Kernels only compute attention over blocks; torch computes the rest."""
        self._model = load_pretrained(AutoModelForCausalLM, spec, dtype).to(device).eval()
        self.device, self.dtype = device, dtype
        signature = Signature.of(self._model.forward)
        self._slots = DenseCaches(self._model, signature, dtype, device)
        self._blocks: BlockCaches | None = None
        name = type(self._model).__name__

        def choose() -> InstructionSet:
            is_cpu = device.type == "cpu"
            return choose_instructions(options.kernels, dtype).instructions if is_cpu else "plain"

        try:
            self._blocks = BlockCaches(
                self._model, signature, dtype, device, choose, self._slots.all_logits
            )
        except BlocksUnsupported as reason:
            self._slots.reason = f"{name} {reason}"
            logger.info("Each sequence gets a separate forward, because %s %s.", name, reason)
        self.num_parameters, self.weight_bytes = Weights.of(self._model)

    def layout(
        self, free_bytes: int, max_num_seqs: int, max_positions: int, block_size: int
    ) -> MemoryLayout:
        if self._blocks is None:
            return self._slots.layout(free_bytes, max_num_seqs, max_positions, block_size)
        wanted = max_num_seqs * -(-max_positions // block_size)
        num_blocks = self._blocks.layout(free_bytes, wanted, block_size)
        return MemoryLayout(
            block_size=block_size,
            num_blocks=num_blocks,
            max_positions=min(max_positions, num_blocks * block_size),
        )

    @property
    def storage(self) -> CacheStorage | None:
        if self._blocks is None or self.device.type != "cpu":
            return None
        return self._blocks.storage

    def open(self, layout: MemoryLayout) -> None:
        memory = self._blocks or self._slots
        memory.open(layout)
        self.traits = self.traits.with_changes(facts=memory.facts)

    def forward(self, chunks: Sequence[Chunk], token_ids: Sequence["array[int]"]) -> Tensor:
        return (self._blocks or self._slots).forward(chunks, token_ids)

    def logits(self, rows: Tensor) -> Tensor:
        return rows.float()

    def copy(self, blocks: Sequence[BlockCopy], slots: Sequence[SlotCopy]) -> None:
        if self._blocks is None:
            self._slots.copy(slots)
        else:
            self._blocks.copy(blocks)


class DenseCaches:
    """Runs one forward per chunk. Each slot has a dense cache, which the model allocates."""

    def __init__(
        self, model: Any, signature: Signature, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._model, self._signature = model, signature
        self._dtype, self._device = dtype, device
        self._cache_name = "past_key_values"
        # State space models use `cache_params` as the name of the cache.
        if "cache_params" in signature.names:
            self._cache_name = "cache_params"
        self._has_masks = self._cache_name == "past_key_values"
        # Whether a forward can add several tokens to a cache. If not, tokens are added one by one.
        self._can_append_many = True
        # The reason why the model does not run over blocks.
        self.reason = ""
        self._caches: dict[SlotId, Any] = {}

    def layout(
        self, free_bytes: int, max_num_seqs: int, max_positions: int, block_size: int
    ) -> MemoryLayout:
        fixed, per_position = self._measure()
        slot_bytes = fixed + per_position * max_positions
        num_slots = max(1, min(max_num_seqs, free_bytes // max(1, slot_bytes)))
        room = max(0, free_bytes // num_slots - fixed)
        if per_position:
            max_positions = min(max_positions, room // per_position)
        return MemoryLayout(
            block_size=block_size,
            num_slots=num_slots,
            max_positions=max_positions,
            forward_per_chunk=True,
        )

    def open(self, layout: MemoryLayout) -> None:
        self._caches.clear()

    @property
    def facts(self) -> LaneFacts:
        return LaneFacts("slot", "lazy-prefix" if self._has_masks else "none", self.reason)

    def forward(self, chunks: Sequence[Chunk], token_ids: Sequence["array[int]"]) -> Tensor:
        rows = [
            self._run(chunk.slot_id, chunk.start, ids, chunk.num_rows)
            for chunk, ids in zip(chunks, token_ids, strict=True)
        ]
        return torch.cat(rows)

    def all_logits(self, ids: "array[int]") -> Tensor:
        """Return float32 logits [tokens, vocab] of one sequence, computed alone and whole."""
        rows = self._run(SlotId(0), 0, ids, len(ids)).float()
        self._caches.clear()
        return rows

    def copy(self, slots: Sequence[SlotCopy]) -> None:
        for copy in slots:
            self._caches[copy.target] = copies.deepcopy(self._caches[copy.source])

    def _run(self, slot: SlotId, start: int, ids: "array[int]", num_rows: int) -> Tensor:
        """Append tokens to a slot's cache; return logits [num_rows, vocab] of the last tokens."""
        if start == 0:
            self._caches[slot] = DynamicCache(config=self._model.config)
        elif not self._can_append_many and len(ids) > 1:
            rows = [self._run(slot, start + i, ids[i : i + 1], 1) for i in range(len(ids))]
            return torch.cat(rows)[len(ids) - num_rows :]
        positions = torch.arange(start, start + len(ids), device=self._device)
        offered = {
            "input_ids": torch.tensor([ids.tolist()], device=self._device),
            "position_ids": positions[None],
            self._cache_name: self._caches[slot],
            "use_cache": True,
            # A value of 0 would mean all rows.
            "logits_to_keep": max(1, num_rows),
            "return_dict": True,
        }
        output = self._model(**self._signature.accepted(offered))
        cache = getattr(output, self._cache_name, None)
        if cache is None:
            raise self._refusal("its forward returns no cache")
        self._caches[slot] = cache
        return output.logits[0, output.logits.shape[1] - num_rows :]

    @torch.inference_mode()
    def _measure(self) -> tuple[int, int]:
        """Return the fixed bytes of a cache, and the bytes per position.

        The method also processes a prompt both whole and in chunks. If the results differ, tokens
        are added one by one. If the results still differ, the method raises ModelError.
        """
        first, *_, length = _PROBE_ENDS
        expected, (whole,) = self._probe((length,))
        for self._can_append_many in (True, False):
            got, (part, *_) = self._probe(_PROBE_ENDS)
            if (got - expected).abs().max() <= TOLERANCE[self._dtype] * expected.abs().max():
                break
        else:
            raise self._refusal("its answer depends on where a prompt is cut")
        per_position = -(-(whole - part) // (length - first))
        return max(0, part - per_position * first), per_position

    def _probe(self, ends: Sequence[int]) -> tuple[Tensor, list[int]]:
        """Return the last token's logits, and the bytes of the cache after each chunk."""
        slot, sizes = SlotId(0), []
        for start, end in zip((0, *ends), ends, strict=False):
            try:
                row = self._run(slot, start, array("i", range(start, end)), 1)
            except FOREIGN_ERRORS as error:
                raise self._refusal(f"its forward fails with {type(error).__name__}") from error
            sizes.append(tensor_bytes(self._caches[slot]))
        return row.float(), sizes

    def _refusal(self, reason: str) -> ModelError:
        name = type(self._model).__name__
        return ModelError(f"Lane {GenericText.traits.id} cannot run {name} in chunks: {reason}.")
