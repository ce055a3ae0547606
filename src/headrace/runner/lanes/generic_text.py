"""Any causal model of transformers: a dense cache per slot, one forward per chunk."""

import copy as copies
from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from headrace.core.errors import ModelError
from headrace.core.ids import SequenceId, SlotId
from headrace.core.layout import MemoryLayout
from headrace.core.plan import BlockCopy, Chunk, SlotCopy
from headrace.models.headers import read_headers
from headrace.models.spec import ModelSpec
from headrace.runner.lanes.foreign import accepted_arguments, tensor_bytes

_PROBE_LENGTH, _PROBE_CUT = 40, 7
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1e-1}


class GenericText:
    id = "generic-text"

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        self._model = _load(spec, dtype).to(device).eval()
        self.device, self.dtype = device, dtype
        self._accepted = accepted_arguments(self._model.forward)
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
        return torch.cat(
            [self._run(chunk, ids) for chunk, ids in zip(chunks, token_ids, strict=True)]
        )

    def logits(self, rows: Tensor) -> Tensor:
        return rows.float()

    def copy(self, blocks: Sequence[BlockCopy], slots: Sequence[SlotCopy]) -> None:
        for copy in slots:
            self._caches[copy.target] = copies.deepcopy(self._caches[copy.source])

    def _run(self, chunk: Chunk, ids: "array[int]") -> Tensor:
        """Logits [num_rows, vocab] of one chunk; its slot's cache grows by it."""
        if chunk.start == 0:
            self._caches[chunk.slot_id] = DynamicCache(config=self._model.config)
        positions = torch.arange(chunk.start, chunk.start + chunk.length, device=self.device)
        offered = {
            "input_ids": torch.tensor([ids.tolist()], device=self.device),
            "position_ids": positions[None],
            "past_key_values": self._caches[chunk.slot_id],
            "use_cache": True,
            "logits_to_keep": max(1, chunk.num_rows),  # NOTE: 0 would mean all of them
            "return_dict": True,
        }
        output = self._model(
            **{
                name: value
                for name, value in offered.items()
                if self._accepted is None or name in self._accepted
            }
        )
        cache = getattr(output, "past_key_values", None)
        if cache is None:
            raise self._refusal("its forward returns no cache")
        self._caches[chunk.slot_id] = cache
        return output.logits[0, output.logits.shape[1] - chunk.num_rows :]

    @torch.inference_mode()
    def _measure(self) -> tuple[int, int]:
        """Bytes of a sequence's cache, at all and per position; proves that cuts change nothing."""
        whole, cut = SlotId(0), SlotId(1)
        expected = self._probe(whole, 0, _PROBE_LENGTH)
        self._probe(cut, 0, _PROBE_CUT)
        sizes = [tensor_bytes(self._caches[slot]) for slot in (cut, whole)]
        got = self._probe(cut, _PROBE_CUT, _PROBE_LENGTH)
        error = (got - expected).abs().max() / expected.abs().max()
        if not error <= _TOLERANCE[self.dtype]:
            raise self._refusal("its answer changes with the place of the cut")
        per_position = -(-(sizes[1] - sizes[0]) // (_PROBE_LENGTH - _PROBE_CUT))
        return max(0, sizes[0] - per_position * _PROBE_CUT), per_position

    def _probe(self, slot: SlotId, start: int, end: int) -> Tensor:
        ids = array("i", range(start, end))
        chunk = Chunk(SequenceId(-1), start, end - start, 1, (), array("i"), slot)
        return self._run(chunk, ids).float()

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
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        for tensor in sorted(str(key) for key in report[kind]):
            raise ModelError(
                f"Tensor {tensor} of {spec.name} is {kind.removesuffix('_keys')}; "
                "check config.json against the weights.",
                "model_corrupt",
            )
    return model
