"""Runs bidirectional encoders of transformers; each prompt runs whole, and nothing is cached."""

from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from headrace_common.checkpoints.spec import ModelSpec
from headrace_common.layout import MemoryLayout
from headrace_common.messages import LaneFacts
from headrace_common.plan import BlockCopy, Chunk, SlotCopy
from headrace_engine.runner.lanes.foreign import Signature, Weights, load_pretrained
from headrace_engine.runner.lanes.lane import LaneOptions, LaneTraits

# The longest prompt of a forward is at most this many times as long as the shortest prompt.
_MAX_PADDING = 1.5
# Prompts of up to this many tokens share a forward, even if their lengths differ.
_SMALL = 16
# Checkpoints can lack these weights, because Headrace pools the vectors itself.
_UNUSED = "pooler."


def task_of(spec: ModelSpec) -> str:
    """Return "embed" or "score" for an encoder that transformers knows, else ""."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
        MODEL_MAPPING_NAMES,
    )

    kind = spec.config.get("model_type", "")
    masked = MODEL_FOR_MASKED_LM_MAPPING_NAMES.get(kind)
    if masked is None or spec.config.get("is_encoder_decoder") or spec.config.get("is_decoder"):
        return ""
    if spec.architecture in (masked, MODEL_MAPPING_NAMES.get(kind)):
        return "embed"
    classifier = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(kind)
    return "score" if spec.architecture == classifier else ""


class GenericEncoder:
    storage = None
    traits = LaneTraits(
        "generic-text", is_whole=True, facts=LaneFacts(memory="slot", mask="bidirectional")
    )

    def __init__(
        self, spec: ModelSpec, dtype: torch.dtype, device: torch.device, _: LaneOptions
    ) -> None:
        from transformers import AutoModel, AutoModelForSequenceClassification

        self._task = task_of(spec)
        auto: Any = AutoModelForSequenceClassification if self._task == "score" else AutoModel
        self._model = load_pretrained(auto, spec, dtype, _UNUSED).to(device).eval()
        self.device, self.dtype = device, dtype
        config = self._model.config
        self._signature = Signature.of(self._model.forward)
        self._has_types = getattr(config, "type_vocab_size", 0) > 1
        padding = getattr(config, "pad_token_id", None)
        self._padding = padding if isinstance(padding, int) and padding >= 0 else 0
        size = config.hidden_size if self._task == "embed" else 0
        self.traits = self.traits.with_changes(tasks=(self._task,), vector_size=size)
        self.num_parameters, self.weight_bytes = Weights.of(self._model)

    def layout(
        self, free_bytes: int, max_num_seqs: int, max_positions: int, block_size: int
    ) -> MemoryLayout:
        """Return slots that only limit the prompts of a step; nothing is kept between steps."""
        longest = min(max_positions, _num_positions(self._model, max_positions))
        return MemoryLayout(block_size=block_size, num_slots=max_num_seqs, max_positions=longest)

    def open(self, layout: MemoryLayout) -> None:
        """Do nothing, because there is no memory to allocate."""

    def forward(self, chunks: Sequence[Chunk], token_ids: Sequence["array[int]"]) -> Tensor:
        rows: dict[int, Tensor] = {}
        for group in _similar_lengths([len(ids) for ids in token_ids]):
            output = self._run([chunks[i] for i in group], [token_ids[i] for i in group])
            for row, i in enumerate(group):
                chunk = chunks[i]
                rows[i] = output[row : row + 1]
                if self._task == "embed":
                    rows[i] = output[row, chunk.length - chunk.num_rows : chunk.length]
        return torch.cat([rows[i] for i in range(len(chunks))])

    def logits(self, rows: Tensor) -> Tensor:
        return rows.float()

    def copy(self, blocks: Sequence[BlockCopy], slots: Sequence[SlotCopy]) -> None:
        """Do nothing, because there is no cache to copy."""

    def _run(self, chunks: Sequence[Chunk], token_ids: Sequence["array[int]"]) -> Tensor:
        """Return hidden states [prompts, longest, hidden], or scores [prompts, labels]."""
        size = (len(chunks), max(map(len, token_ids)))
        ids = torch.full(size, self._padding)
        mask, types = torch.zeros(size, dtype=torch.long), torch.zeros(size, dtype=torch.long)
        for row, (chunk, prompt) in enumerate(zip(chunks, token_ids, strict=True)):
            ids[row, : len(prompt)] = torch.tensor(prompt)
            mask[row, : len(prompt)] = 1
            if chunk.num_first:
                types[row, chunk.num_first : len(prompt)] = 1
        offered = {"input_ids": ids, "attention_mask": mask, "return_dict": True}
        if self._has_types:
            offered["token_type_ids"] = types
        accepted = self._signature.accepted(offered)
        on_device = {
            name: value.to(self.device) if isinstance(value, Tensor) else value
            for name, value in accepted.items()
        }
        output = self._model(**on_device)
        return output.logits if self._task == "score" else output.last_hidden_state


def _similar_lengths(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Group prompts of similar lengths, so that little padding is processed."""
    group: list[int] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if group and lengths[i] > max(_SMALL, _MAX_PADDING * lengths[group[0]]):
            yield group
            group = []
        group.append(i)
    yield group


def _num_positions(model: Any, otherwise: int) -> int:
    """Return the number of positions in the model's table, or `otherwise` if there is no table.

    Models like RoBERTa reserve the entries up to the padding token's id.
    """
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and isinstance(module, torch.nn.Embedding):
            padding = module.padding_idx
            return module.num_embeddings - (0 if padding is None else padding + 1)
    return otherwise
