"""Any causal model of transformers: a dense cache per slot, one forward per chunk."""

import copy as copies
from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from headrace.checkpoints.headers import read_headers
from headrace.checkpoints.spec import ModelSpec
from headrace.core.errors import ModelError
from headrace.core.ids import SlotId
from headrace.core.layout import MemoryLayout
from headrace.core.plan import BlockCopy, Chunk, SlotCopy
from headrace.runner.lanes.foreign import Signature, tensor_bytes

_PROBE_ENDS = (7, 37, 40)
"""Of the chunks that prove a lane. The last is short: of a model that forgets what came before a
chunk, little is then left to answer from, and the answer is wrong by more than rounding."""

_FAULTS = {
    "missing_keys": "is missing",
    "unexpected_keys": "is unknown to the model",
    "mismatched_keys": "has another shape than the model's",
}
_FOREIGN = (AttributeError, LookupError, NotImplementedError, TypeError, ValueError)
"""What code that is not ours raises where it is not made for what we give it."""

_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


class GenericText:
    id = "generic-text"

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        self._model = _load(spec, dtype).to(device).eval()
        self.device, self.dtype = device, dtype
        self._signature = Signature.of(self._model.forward)
        self._cache_name = "past_key_values"
        if "cache_params" in self._signature.names:  # what state space models call it
            self._cache_name = "cache_params"
        self._extends = True  # by several tokens at once; else a prompt goes on one by one
        self._caches: dict[SlotId, Any] = {}
        parameters = list(self._model.parameters())
        self.num_parameters = sum(p.numel() for p in parameters)
        self.weight_bytes = sum(p.nbytes for p in parameters)

    def layout(
        self, free_bytes: int, max_num_seqs: int, max_positions: int, block_size: int
    ) -> MemoryLayout:
        fixed, per_position = self._measure()
        slot_bytes = fixed + per_position * max_positions
        num_slots = max(1, min(max_num_seqs, free_bytes // max(1, slot_bytes)))
        room = max(0, free_bytes // num_slots - fixed)
        if per_position:
            max_positions = min(max_positions, room // per_position)
        return MemoryLayout(block_size=block_size, num_slots=num_slots, max_positions=max_positions)

    def open(self, layout: MemoryLayout) -> None:
        self._caches.clear()

    def forward(self, chunks: Sequence[Chunk], token_ids: Sequence["array[int]"]) -> Tensor:
        rows = [
            self._run(chunk.slot_id, chunk.start, ids, chunk.num_rows)
            for chunk, ids in zip(chunks, token_ids, strict=True)
        ]
        return torch.cat(rows)

    def logits(self, rows: Tensor) -> Tensor:
        return rows.float()

    def copy(self, blocks: Sequence[BlockCopy], slots: Sequence[SlotCopy]) -> None:
        for copy in slots:
            self._caches[copy.target] = copies.deepcopy(self._caches[copy.source])

    def _run(self, slot: SlotId, start: int, ids: "array[int]", num_rows: int) -> Tensor:
        """Logits [num_rows, vocab] of the last of these tokens; the slot's cache grows by all."""
        if start == 0:
            self._caches[slot] = DynamicCache(config=self._model.config)
        elif not self._extends and len(ids) > 1:
            rows = [self._run(slot, start + i, ids[i : i + 1], 1) for i in range(len(ids))]
            return torch.cat(rows)[len(ids) - num_rows :]
        positions = torch.arange(start, start + len(ids), device=self.device)
        offered = {
            "input_ids": torch.tensor([ids.tolist()], device=self.device),
            "position_ids": positions[None],
            self._cache_name: self._caches[slot],
            "use_cache": True,
            "logits_to_keep": max(1, num_rows),  # NOTE: 0 would mean all of them
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
        """Bytes of a sequence's cache, at all and per position; proves that cuts change nothing."""
        first, *_, length = _PROBE_ENDS
        expected, (whole,) = self._probe((length,))
        for self._extends in (True, False):
            got, (part, *_) = self._probe(_PROBE_ENDS)
            if (got - expected).abs().max() <= _TOLERANCE[self.dtype] * expected.abs().max():
                break
        else:
            raise self._refusal("its answer changes with the place of the cut")
        per_position = -(-(whole - part) // (length - first))
        return max(0, part - per_position * first), per_position

    def _probe(self, ends: Sequence[int]) -> tuple[Tensor, list[int]]:
        """Logits of a prompt's last token, and the bytes of its cache after each chunk."""
        slot, sizes = SlotId(0), []
        for start, end in zip((0, *ends), ends, strict=False):
            try:
                row = self._run(slot, start, array("i", range(start, end)), 1)
            except _FOREIGN as error:
                raise self._refusal(f"its forward ends with {type(error).__name__}") from error
            sizes.append(tensor_bytes(self._caches[slot]))
        return row.float(), sizes

    def _refusal(self, reason: str) -> ModelError:
        name = type(self._model).__name__
        return ModelError(f"{name} cannot be run in chunks by lane {self.id}: {reason}.")


def _load(spec: ModelSpec, dtype: torch.dtype) -> Any:
    read_headers(spec)  # a damaged file is named before transformers meets it
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        spec.folder,
        dtype=dtype,
        local_files_only=True,
        trust_remote_code=False,
        use_safetensors=True,
        ignore_mismatched_sizes=True,  # they are in the report
        output_loading_info=True,
    )
    model, report = loaded
    for kind, fault in _FAULTS.items():
        for key in report[kind]:
            tensor = key if isinstance(key, str) else key[0]  # mismatched ones with their shapes
            raise ModelError(
                f"Tensor {tensor} of {spec.name} {fault}; check config.json against the weights.",
                "model_corrupt",
            )
    return model
