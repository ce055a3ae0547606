"""Runs native vision-language models over KV blocks, like native text models.

The vision encoder runs outside the packed forward, a few encoder blocks at a time. The output of
the encoder replaces the embeddings of an image's placeholders.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import torch
from torch import Tensor

from headrace_common.checkpoints.spec import ModelSpec
from headrace_common.ids import SequenceId
from headrace_common.messages import LaneFacts
from headrace_common.plan import Chunk, EncodeChunk, EncoderInput, PromptInputs
from headrace_engine.runner.inputs import Batch, pack
from headrace_engine.runner.lanes.foreign import Weights
from headrace_engine.runner.lanes.image_tensors import FeatureCache, ImageTensors
from headrace_engine.runner.lanes.lane import LaneOptions
from headrace_engine.runner.lanes.native_text import NativeText
from headrace_engine.runner.lanes.vision_tower import TowerState, VisionTower


@dataclass(slots=True)
class _SequenceImages:
    """The images of a sequence, the positions of its prompt, and the features still needed."""

    works: tuple[EncoderInput, ...]
    positions: Tensor  # int64 [3, tokens]
    # The features of each image, by the index of the image. An entry is removed once the image's
    # last placeholder is processed.
    features: dict[int, Tensor] = field(default_factory=dict)
    state: TowerState | None = None

    @property
    def shift(self) -> int:
        """Return the difference between the position and the index of a token after the prompt.

        The difference is usually negative, because an image advances the position by its number
        of rows or columns, not by its number of tokens.
        """
        return int(self.positions.max()) + 1 - self.positions.shape[1]


class NativeMultimodal(NativeText):
    traits = NativeText.traits.with_changes(
        id="native-multimodal", facts=LaneFacts(encoder="pieces")
    )

    def __init__(
        self, spec: ModelSpec, dtype: torch.dtype, device: torch.device, options: LaneOptions
    ) -> None:
        super().__init__(spec, dtype, device, options)
        self._tower = VisionTower(spec, dtype, device)
        vision = Weights.of(self._tower.module)
        self.num_parameters += vision.num
        self.weight_bytes += vision.num_bytes
        # How many images the vision encoder has processed.
        self.num_encoded = 0
        self._feature_cache = FeatureCache()
        self._images: dict[SequenceId, _SequenceImages] = {}

    def begin(self, sequence_id: SequenceId, inputs: PromptInputs) -> None:
        positions = _image_tensors(inputs.works[0]).read_positions()
        assert positions is not None, "the image processor of this model returns positions"
        self._images[sequence_id] = _SequenceImages(inputs.works, positions[:, 0])

    def end(self, sequence_id: SequenceId) -> None:
        del self._images[sequence_id]

    def encode(self, chunk: EncodeChunk, work: EncoderInput) -> bool:
        images = self._images[chunk.sequence_id]
        if chunk.start == 0:
            images.state = None
            if (known := self._feature_cache.find(work.mark)) is not None:
                images.features[chunk.work] = known
            else:
                images.state = self._tower.begin(_image_tensors(work).read())
        if images.state is None:
            return False
        rows = self._tower.advance(images.state, chunk.start, chunk.end)
        if rows is not None:
            if len(rows) != work.end - work.start:
                message = f"{work.end - work.start} placeholders, but features for {len(rows)}"
                raise ValueError(message)
            images.features[chunk.work], images.state = rows, None
            self._feature_cache.keep(work.mark, rows)
            self.num_encoded += 1
        return True

    def forward(self, chunks: Sequence[Chunk], token_ids: Sequence["array[int]"]) -> Tensor:
        if not any(chunk.sequence_id in self._images for chunk in chunks):
            return super().forward(chunks, token_ids)
        batch = pack(chunks, token_ids, self._storage.block_size, self.device)
        batch = replace(batch, positions=self._positions(chunks, batch))
        features = list(self._features(chunks, batch))
        if batch.positions.ndim == 1 and not features:
            return self._rows(batch, self._hidden(batch))
        embedded = self._model.embed(batch.token_ids)
        for first, rows in features:
            embedded[first : first + len(rows)] = rows
        hidden: Tensor = self._model.forward_embedded(embedded, self._attention.step(batch))
        self._forget(chunks)
        return self._rows(batch, hidden)

    def _positions(self, chunks: Sequence[Chunk], batch: Batch) -> Tensor:
        """Return positions int64 [3, tokens], or [tokens] if all three axes are equal."""
        positions = batch.positions.expand(3, -1).clone()
        for chunk, first in zip(chunks, batch.first_rows.tolist(), strict=True):
            images = self._images.get(chunk.sequence_id)
            if images is None:
                continue
            num = images.positions.shape[1]
            inside = images.positions[:, chunk.start : chunk.start + chunk.length]
            end, prompt_end = first + chunk.length, first + inside.shape[1]
            positions[:, first:prompt_end] = inside.to(self.device)
            if chunk.start + chunk.length > num:
                positions[:, prompt_end:end] += images.shift
        is_plain = bool((positions[0] == positions).all())
        return positions[0].contiguous() if is_plain else positions

    def _features(self, chunks: Sequence[Chunk], batch: Batch) -> Iterator[tuple[int, Tensor]]:
        """Yield the first index in the batch and the features of each range of placeholders."""
        for chunk, first in zip(chunks, batch.first_rows.tolist(), strict=True):
            images = self._images.get(chunk.sequence_id)
            for number, work in enumerate(images.works if images else ()):
                start = max(chunk.start, work.start)
                end = min(chunk.start + chunk.length, work.end)
                if images is not None and start < end:
                    rows = images.features[number][start - work.start : end - work.start]
                    yield first + start - chunk.start, rows

    def _forget(self, chunks: Sequence[Chunk]) -> None:
        """Drop the features of images whose last placeholder has been processed."""
        for chunk in chunks:
            if (images := self._images.get(chunk.sequence_id)) is not None:
                for number, work in enumerate(images.works):
                    if work.end <= chunk.start + chunk.length:
                        images.features.pop(number, None)


def _image_tensors(work: EncoderInput) -> ImageTensors:
    return msgspec.msgpack.decode(work.data, type=ImageTensors)
