"""Runs image-text models of transformers; image features replace the embeddings of placeholders.

A sequence has a dense cache in a slot. An image is encoded in one piece and only once. The tokens
may be cut into chunks anywhere, even within an image.
"""

import copy as copies
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, DynamicCache

from headrace_common.checkpoints.spec import ModelSpec
from headrace_common.errors import ModelError
from headrace_common.ids import SequenceId, SlotId
from headrace_common.layout import MemoryLayout
from headrace_common.messages import LaneFacts
from headrace_common.plan import BlockCopy, Chunk, EncodeChunk, EncoderInput, SlotCopy
from headrace_engine.runner.lanes.foreign import (
    TOLERANCE,
    Signature,
    SlotLane,
    Weights,
    load_pretrained,
    tensor_bytes,
)
from headrace_engine.runner.lanes.image_tensors import FeatureCache, ImageTensors
from headrace_engine.runner.lanes.lane import LaneOptions, LaneTraits

# The number of tokens whose cache is measured.
_PROBE = 40
# The number of placeholders in the prompt that tests cutting into chunks.
_PROBE_ROWS = 4
# The names that configs use for a placeholder's id.
_IDS = ("image_token_id", "image_token_index")


@dataclass(slots=True)
class _SlotContent:
    """The content of a slot: the cache, and the features that later placeholders will use."""

    # None after a copy: the sequence that will own this slot has not run yet.
    owner: SequenceId | None
    cache: Any
    # One tensor [rows, hidden] per image, in order.
    features: list[Tensor] = field(default_factory=list)
    # The number of feature rows that have already replaced placeholders.
    num_used: int = 0
    # bool [1, tokens]: which tokens so far are placeholders.
    is_placeholder: Tensor | None = None
    # The positions of the prompt, [axes, 1, tokens].
    positions: Tensor | None = None


class GenericMultimodal(SlotLane):
    traits = LaneTraits(
        "generic-multimodal", facts=LaneFacts("slot", "lazy-prefix", encoder="whole")
    )

    def __init__(
        self, spec: ModelSpec, dtype: torch.dtype, device: torch.device, _: LaneOptions
    ) -> None:
        self._model = load_pretrained(AutoModelForImageTextToText, spec, dtype).to(device).eval()
        self.device, self.dtype = device, dtype
        # How many images the encoder has processed.
        self.num_encoded = 0
        self._signature = Signature.of(self._model.forward)
        self._encoder_signature = Signature.of(self._model.model.get_image_features)
        self._text_config = self._model.config.get_text_config()
        self._has_axes = hasattr(self._model.model, "get_rope_index")
        ids = [getattr(self._model.config, name, None) for name in _IDS]
        self._image_id = next((int(found) for found in ids if found is not None), -1)
        if self._image_id < 0:
            raise ModelError(
                f"The config of {spec.architecture} names no placeholder token for images."
            )
        self._contents: dict[SlotId, _SlotContent] = {}
        self._feature_cache = FeatureCache()
        self.num_parameters, self.weight_bytes = Weights.of(self._model)
        self._check_cuts(spec)

    def open(self, layout: MemoryLayout) -> None:
        self._contents.clear()

    def encode(self, chunk: EncodeChunk, work: EncoderInput) -> bool:
        content = self._content(chunk.slot_id, chunk.sequence_id, chunk.work == 0)
        image = msgspec.msgpack.decode(work.data, type=ImageTensors)
        if chunk.work == 0:
            content.features, content.num_used = [], 0
            content.positions = image.read_positions()
        rows, is_new = self._features(work.mark, image)
        if len(rows) != image.num_rows:
            raise ValueError(f"{image.num_rows} placeholders, but features for {len(rows)}")
        content.features.append(rows)
        return is_new

    def _features(self, mark: bytes, image: ImageTensors) -> tuple[Tensor, bool]:
        """Return an image's features [placeholders, hidden], and whether this call computed any.

        The encoder does not run again while the image's features are in the cache.
        """
        if (known := self._feature_cache.find(mark)) is not None:
            return known, False
        tensors = {name: t.to(self.device) for name, t in image.read().items()}
        if "pixel_values" in tensors:
            tensors["pixel_values"] = tensors["pixel_values"].to(self.dtype)
        offered = self._encoder_signature.accepted(tensors) | {"return_dict": True}
        output = self._model.get_image_features(**offered)
        found = getattr(output, "pooler_output", output)
        parts = list(found) if isinstance(found, list | tuple) else [found]
        rows = torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])
        self.num_encoded += 1
        self._feature_cache.keep(mark, rows)
        return rows, True

    def _content(self, slot: SlotId, owner: SequenceId, begins: bool) -> _SlotContent:
        """Return the slot's content; the content of another sequence is replaced first."""
        content = self._contents.get(slot)
        if content is not None and content.owner is None and not begins:
            content.owner = owner
        if content is None or content.owner != owner:
            content = self._contents[slot] = _SlotContent(owner, self._new_cache())
        return content

    def _new_cache(self) -> Any:
        return DynamicCache(config=self._text_config)

    def _run(self, chunk: Chunk, token_ids: "array[int]") -> Tensor:
        content = self._content(chunk.slot_id, chunk.sequence_id, chunk.start == 0)
        if chunk.start == 0:
            content.cache, content.num_used, content.is_placeholder = self._new_cache(), 0, None
        ids = torch.tensor([token_ids.tolist()], device=self.device)
        is_image = ids.eq(self._image_id)
        num_left = sum(len(rows) for rows in content.features) - content.num_used
        # An answer can also contain placeholder tokens, which no features replace.
        is_image &= is_image.cumsum(1) <= num_left
        # In some models, attention within an image is bidirectional. As a result, the mask
        # depends on all placeholders so far.
        is_placeholder = (
            is_image
            if content.is_placeholder is None
            else torch.cat([content.is_placeholder, is_image], 1)
        )
        content.is_placeholder = is_placeholder
        offered = {
            "inputs_embeds": self._embed(content, ids, is_image),
            "position_ids": self._positions(content, chunk.start, len(token_ids)),
            "token_type_ids": is_placeholder.long(),
            "past_key_values": content.cache,
            "use_cache": True,
            "logits_to_keep": max(1, chunk.num_rows),
            "return_dict": True,
        }
        if not content.features:
            del offered["token_type_ids"]
        output = self._model(**self._signature.accepted(offered))
        content.cache = output.past_key_values
        logits: Tensor = output.logits
        return logits[0, logits.shape[1] - chunk.num_rows :]

    def _embed(self, content: _SlotContent, ids: Tensor, is_image: Tensor) -> Tensor:
        """Return embeddings [1, tokens, hidden], with features in place of placeholders."""
        embeds: Tensor = self._model.get_input_embeddings()(ids.masked_fill(is_image, 0))
        num = int(is_image.sum())
        if num:
            rows = torch.cat(content.features)[content.num_used : content.num_used + num]
            embeds = embeds.masked_scatter(is_image[..., None], rows.to(embeds.dtype))
            content.num_used += num
        return embeds

    def _positions(self, content: _SlotContent, start: int, length: int) -> Tensor:
        """Return positions [1, tokens], or [3, 1, tokens] if positions have three axes."""
        plain = torch.arange(start, start + length, device=self.device)
        if not self._has_axes:
            return plain[None]
        if content.positions is None:
            return plain.expand(3, 1, -1)
        known = content.positions.to(self.device)
        num = known.shape[-1]
        after = plain + (known.max() + 1 - num)
        inside = known[:, :, start : start + length]
        return torch.cat([inside, after[max(0, num - start) :].expand(3, 1, -1)], dim=-1)

    def copy(self, blocks: Sequence[BlockCopy], slots: Sequence[SlotCopy]) -> None:
        for copy in slots:
            source = self._contents[copy.source]
            target = copies.copy(source)
            target.cache, target.owner = copies.deepcopy(source.cache), None
            self._contents[copy.target] = target

    @torch.inference_mode()
    def _check_cuts(self, spec: ModelSpec) -> None:
        """Raise ModelError if cutting a prompt after an image changes the result.

        A change means that text attends to later tokens.
        """
        ids = array("i", [0, 1, *[self._image_id] * _PROBE_ROWS, *range(2, 10)])
        whole, cut = self._probe(ids, len(ids)), self._probe(ids, _PROBE_ROWS + 5)
        self._contents.clear()
        if (cut - whole).abs().max() > TOLERANCE.get(self.dtype, 5e-2) * whole.abs().max():
            raise ModelError(
                f"The results of {spec.architecture} change when a prompt is cut into chunks, "
                "because its text tokens attend to later tokens. Such models are not supported."
            )

    def _probe(self, ids: "array[int]", cut: int) -> Tensor:
        """Return the last token's logits [1, vocab] for a prompt that is cut at `cut`.

        The embeddings of some ordinary tokens serve as the features of an image.
        """
        rows = self._model.get_input_embeddings()(torch.arange(_PROBE_ROWS, device=self.device))
        owner, slot = SequenceId(-1), SlotId(0)
        self._contents[slot] = _SlotContent(owner, self._new_cache(), [rows])
        for start, end in ((0, cut), (cut, len(ids))):
            if start < end:
                chunk = Chunk(owner, start, end - start, 1, (), array("i"), slot)
                logits = self._run(chunk, ids[start:end])
        return logits

    @torch.inference_mode()
    def _measure(self) -> int:
        chunk = Chunk(SequenceId(-1), 0, _PROBE, 1, (), array("i"), SlotId(0))
        self._run(chunk, array("i", [0] * _PROBE))
        return max(1, -(-tensor_bytes(self._contents[SlotId(0)].cache) // _PROBE))
