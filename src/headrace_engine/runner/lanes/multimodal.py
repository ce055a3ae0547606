"""Image-text models of transformers: each image is seen once, its features stand for placeholders.

A sequence has a dense cache in a slot. An image is encoded whole; the tokens around it are cut
anywhere, within the image too.
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
from headrace_common.plan import BlockCopy, Chunk, EncodeChunk, EncodeWork, SlotCopy
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

_PROBE = 40  # tokens whose cache is measured
_PROBE_ROWS = 4  # of an image, on which cuts are tried
_IDS = ("image_token_id", "image_token_index")  # what configs call a placeholder's id


@dataclass(slots=True)
class _ImagePlace:
    """The content of a slot: the cache, and the features that wait for their placeholders."""

    owner: SequenceId | None  # None: a sibling's, that has not run yet
    cache: Any
    features: list[Tensor] = field(default_factory=list)  # [rows, hidden] each, in order
    num_used: int = 0  # rows
    shown: Tensor | None = None  # bool [1, tokens]: which tokens so far are placeholders
    positions: Tensor | None = None  # [axes, 1, tokens] of the prompt


class GenericMultimodal(SlotLane):
    traits = LaneTraits(
        "generic-multimodal", facts=LaneFacts("slot", "lazy-prefix", encoder="whole")
    )

    def __init__(
        self, spec: ModelSpec, dtype: torch.dtype, device: torch.device, _: LaneOptions
    ) -> None:
        self._model = load_pretrained(AutoModelForImageTextToText, spec, dtype).to(device).eval()
        self.device, self.dtype = device, dtype
        self.num_encoded = 0  # images that went through the encoder
        self._signature = Signature.of(self._model.forward)
        self._encoder_signature = Signature.of(self._model.model.get_image_features)
        self._text_config = self._model.config.get_text_config()
        self._has_axes = hasattr(self._model.model, "get_rope_index")
        ids = [getattr(self._model.config, name, None) for name in _IDS]
        self._image_id = next((int(found) for found in ids if found is not None), -1)
        if self._image_id < 0:
            raise ModelError(f"{spec.architecture} does not say which token stands for an image.")
        self._places: dict[SlotId, _ImagePlace] = {}
        self._seen = FeatureCache()
        self.num_parameters, self.weight_bytes = Weights.of(self._model)
        self._check_cuts(spec)

    def open(self, layout: MemoryLayout) -> None:
        self._places.clear()

    def encode(self, chunk: EncodeChunk, work: EncodeWork) -> bool:
        place = self._place(chunk.slot_id, chunk.sequence_id, chunk.work == 0)
        image = msgspec.msgpack.decode(work.data, type=ImageTensors)
        if chunk.work == 0:
            place.features, place.num_used = [], 0
            place.positions = image.read_positions()
        rows, is_new = self._features(work.mark, image)
        if len(rows) != image.num_rows:
            raise ValueError(f"{image.num_rows} placeholders, and features for {len(rows)}")
        place.features.append(rows)
        return is_new

    def _features(self, mark: bytes, image: ImageTensors) -> tuple[Tensor, bool]:
        """Rows [placeholders, hidden] of an image, and whether they were computed.

        The encoder sees an image once while it can.
        """
        if (known := self._seen.find(mark)) is not None:
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
        self._seen.keep(mark, rows)
        return rows, True

    def _place(self, slot: SlotId, owner: SequenceId, begins: bool) -> _ImagePlace:
        """The slot's, or a new one if it was somebody else's."""
        place = self._places.get(slot)
        if place is not None and place.owner is None and not begins:
            place.owner = owner
        if place is None or place.owner != owner:
            place = self._places[slot] = _ImagePlace(owner, self._new_cache())
        return place

    def _new_cache(self) -> Any:
        return DynamicCache(config=self._text_config)

    def _run(self, chunk: Chunk, token_ids: "array[int]") -> Tensor:
        place = self._place(chunk.slot_id, chunk.sequence_id, chunk.start == 0)
        if chunk.start == 0:
            place.cache, place.num_used, place.shown = self._new_cache(), 0, None
        ids = torch.tensor([token_ids.tolist()], device=self.device)
        is_image = ids.eq(self._image_id)
        num_left = sum(len(rows) for rows in place.features) - place.num_used
        is_image &= is_image.cumsum(1) <= num_left  # an answer may have such tokens, too
        # masks of models whose images attend both ways are made for all tokens so far
        shown = is_image if place.shown is None else torch.cat([place.shown, is_image], 1)
        place.shown = shown
        offered = {
            "inputs_embeds": self._embed(place, ids, is_image),
            "position_ids": self._positions(place, chunk.start, len(token_ids)),
            "token_type_ids": shown.long(),
            "past_key_values": place.cache,
            "use_cache": True,
            "logits_to_keep": max(1, chunk.num_rows),
            "return_dict": True,
        }
        if not place.features:
            del offered["token_type_ids"]
        output = self._model(**self._signature.accepted(offered))
        place.cache = output.past_key_values
        logits: Tensor = output.logits
        return logits[0, logits.shape[1] - chunk.num_rows :]

    def _embed(self, place: _ImagePlace, ids: Tensor, is_image: Tensor) -> Tensor:
        """[1, tokens, hidden]; the next rows of the features take the place of placeholders."""
        embeds: Tensor = self._model.get_input_embeddings()(ids.masked_fill(is_image, 0))
        num = int(is_image.sum())
        if num:
            rows = torch.cat(place.features)[place.num_used : place.num_used + num]
            embeds = embeds.masked_scatter(is_image[..., None], rows.to(embeds.dtype))
            place.num_used += num
        return embeds

    def _positions(self, place: _ImagePlace, start: int, length: int) -> Tensor:
        """[1, tokens], or [3, 1, tokens] where images have rows and columns of their own."""
        plain = torch.arange(start, start + length, device=self.device)
        if not self._has_axes:
            return plain[None]
        if place.positions is None:
            return plain.expand(3, 1, -1)
        known = place.positions.to(self.device)
        num = known.shape[-1]
        after = plain + (known.max() + 1 - num)
        inside = known[:, :, start : start + length]
        return torch.cat([inside, after[max(0, num - start) :].expand(3, 1, -1)], dim=-1)

    def copy(self, blocks: Sequence[BlockCopy], slots: Sequence[SlotCopy]) -> None:
        for copy in slots:
            source = self._places[copy.source]
            target = copies.copy(source)
            target.cache, target.owner = copies.deepcopy(source.cache), None
            self._places[copy.target] = target

    @torch.inference_mode()
    def _check_cuts(self, spec: ModelSpec) -> None:
        """ModelError if a cut behind an image changes what follows: then text attends both ways."""
        ids = array("i", [0, 1, *[self._image_id] * _PROBE_ROWS, *range(2, 10)])
        whole, cut = self._probe(ids, len(ids)), self._probe(ids, _PROBE_ROWS + 5)
        self._places.clear()
        if (cut - whole).abs().max() > TOLERANCE.get(self.dtype, 5e-2) * whole.abs().max():
            raise ModelError(
                f"{spec.architecture} reads a prompt in parts in another way than whole, since its "
                "text attends to what comes later; such models are not supported."
            )

    def _probe(self, ids: "array[int]", cut: int) -> Tensor:
        """Logits of the last token, [1, vocab]; other tokens' embeddings stand for an image."""
        rows = self._model.get_input_embeddings()(torch.arange(_PROBE_ROWS, device=self.device))
        owner, slot = SequenceId(-1), SlotId(0)
        self._places[slot] = _ImagePlace(owner, self._new_cache(), [rows])
        for start, end in ((0, cut), (cut, len(ids))):
            if start < end:
                chunk = Chunk(owner, start, end - start, 1, (), array("i"), slot)
                logits = self._run(chunk, ids[start:end])
        return logits

    @torch.inference_mode()
    def _measure(self) -> int:
        chunk = Chunk(SequenceId(-1), 0, _PROBE, 1, (), array("i"), SlotId(0))
        self._run(chunk, array("i", [0] * _PROBE))
        return max(1, -(-tensor_bytes(self._places[SlotId(0)].cache) // _PROBE))
