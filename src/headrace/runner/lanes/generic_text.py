"""Any causal model of transformers: a dense cache per slot, one forward per chunk."""

import copy as copies
import inspect
from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from headrace.core.errors import ModelError
from headrace.core.layout import MemoryLayout
from headrace.core.plan import BlockCopy, Chunk, SlotCopy
from headrace.models.spec import ModelSpec

_PROBE_LENGTHS = (8, 40)


class GenericText:
    id = "generic-text"

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        self._model = _load(spec, dtype).to(device).eval()
        self.device, self.dtype = device, dtype
        self._accepted = _accepted_arguments(self._model.forward)
        self._caches: dict[int, Any] = {}
        parameters = list(self._model.parameters())
        self.num_parameters = sum(p.numel() for p in parameters)
        self.weight_bytes = sum(p.nbytes for p in parameters)

    def layout(
        self, free_bytes: int, max_num_seqs: int, max_positions: int, block_size: int
    ) -> MemoryLayout:
        fixed, per_position = self._cache_bytes()
        slot_bytes = fixed + per_position * max_positions
        num_slots = max(1, min(max_num_seqs, free_bytes // max(1, slot_bytes)))
        room = (free_bytes // num_slots - fixed) // per_position if per_position else max_positions
        return MemoryLayout(
            block_size=block_size,
            num_slots=num_slots,
            max_positions=max(0, min(max_positions, room)),
        )

    def open(self, layout: MemoryLayout) -> None:
        self._caches.clear()

    def forward(self, chunks: Sequence[Chunk], token_ids: Sequence["array[int]"]) -> Tensor:
        rows = []
        for chunk, ids in zip(chunks, token_ids, strict=True):
            if chunk.start == 0:
                self._caches[chunk.slot_id] = DynamicCache(config=self._model.config)
            cache = self._caches[chunk.slot_id]
            logits, self._caches[chunk.slot_id] = self._run(chunk, ids, cache)
            rows.append(logits)
        return torch.cat(rows)

    def logits(self, rows: Tensor) -> Tensor:
        return rows.float()

    def copy(self, blocks: Sequence[BlockCopy], slots: Sequence[SlotCopy]) -> None:
        for copy in slots:
            self._caches[copy.target] = copies.deepcopy(self._caches[copy.source])

    def _run(self, chunk: Chunk, ids: "array[int]", cache: Any) -> tuple[Tensor, Any]:
        """Logits [num_rows, vocab] of one chunk, and the cache grown by it."""
        positions = torch.arange(chunk.start, chunk.start + chunk.length, device=self.device)
        offered = {
            "input_ids": torch.tensor([list(ids)], device=self.device),
            "position_ids": positions[None],
            "past_key_values": cache,
            "use_cache": True,
            "logits_to_keep": max(1, chunk.num_rows),  # NOTE: 0 would mean all of them
            "return_dict": True,
        }
        taken = {
            name: value
            for name, value in offered.items()
            if self._accepted is None or name in self._accepted
        }
        output = self._model(**taken)
        cache = getattr(output, "past_key_values", None)
        if cache is None:
            raise ModelError(
                f"The forward of {type(self._model).__name__} returned no cache in lane {self.id}; "
                "this model cannot be taken in chunks."
            )
        first = output.logits.shape[1] - chunk.num_rows
        return output.logits[0, first:], cache

    def _cache_bytes(self) -> tuple[int, int]:
        """Measured bytes of a sequence's cache: what it takes at all, and per position."""
        sizes = []
        with torch.inference_mode():
            for length in _PROBE_LENGTHS:
                chunk = Chunk(0, 0, length, 0, (), array("i"), 0)  # type: ignore[arg-type]
                self.forward([chunk], [array("i", [0] * length)])
                sizes.append(_tensor_bytes(self._caches.pop(0), set()))
        per_position = -(-(sizes[1] - sizes[0]) // (_PROBE_LENGTHS[1] - _PROBE_LENGTHS[0]))
        return max(0, sizes[0] - per_position * _PROBE_LENGTHS[0]), per_position


def _load(spec: ModelSpec, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        spec.folder,
        dtype=dtype,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
    )


def _accepted_arguments(forward: Any) -> frozenset[str] | None:
    """Names that `forward` takes; None if it takes any, or does not say."""
    try:
        parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return frozenset(parameter.name for parameter in parameters)


def _tensor_bytes(value: Any, seen: set[int]) -> int:
    """Bytes of all tensors that an object holds, each counted once."""
    if id(value) in seen:
        return 0
    seen.add(id(value))
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return sum(_tensor_bytes(part, seen) for part in value.values())
    if isinstance(value, list | tuple):
        return sum(_tensor_bytes(part, seen) for part in value)
    return _tensor_bytes(vars(value), seen) if hasattr(value, "__dict__") else 0
