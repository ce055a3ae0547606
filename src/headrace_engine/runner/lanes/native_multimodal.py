"""Our own implementations of models that also see, over the same block memory.

Images are seen apart from the packed forward, in pieces of a few blocks. Where a chunk has their
placeholders, rows that the vision side made stand for embeddings.
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
from headrace_common.plan import Chunk, EncodeChunk, EncodeWork, PromptInputs
from headrace_engine.runner.inputs import Batch, pack
from headrace_engine.runner.lanes.foreign import Weights
from headrace_engine.runner.lanes.image_tensors import FeatureCache, ImageTensors
from headrace_engine.runner.lanes.lane import LaneOptions
from headrace_engine.runner.lanes.native_text import NativeText
from headrace_engine.runner.lanes.vision_tower import TowerRun, VisionTower


@dataclass(slots=True)
class _Shown:
    """The images of a sequence: works, positions of its prompt, and features."""

    works: tuple[EncodeWork, ...]
    positions: Tensor  # int64 [3, tokens] of its prompt
    features: dict[int, Tensor] = field(default_factory=dict)  # by work, until they are computed
    run: TowerRun | None = None

    @property
    def shift(self) -> int:
        """The positions that images save by having rows and columns; the answer's follow on."""
        return int(self.positions.max()) + 1 - self.positions.shape[1]


class NativeMultimodal(NativeText):
    traits = NativeText.traits.but(id="native-multimodal", facts=LaneFacts(encoder="pieces"))

    def __init__(
        self, spec: ModelSpec, dtype: torch.dtype, device: torch.device, options: LaneOptions
    ) -> None:
        super().__init__(spec, dtype, device, options)
        self._tower = VisionTower(spec, dtype, device)
        seeing = Weights.of(self._tower.module)
        self.num_parameters += seeing.num
        self.weight_bytes += seeing.num_bytes
        self.num_encoded = 0  # images that went through the vision side
        self._seen = FeatureCache()
        self._shown: dict[SequenceId, _Shown] = {}

    def begin(self, sequence_id: SequenceId, inputs: PromptInputs) -> None:
        positions = _image_tensors(inputs.works[0]).read_positions()
        assert positions is not None, "its processor counts them"
        self._shown[sequence_id] = _Shown(inputs.works, positions[:, 0])

    def end(self, sequence_id: SequenceId) -> None:
        del self._shown[sequence_id]

    def encode(self, chunk: EncodeChunk, work: EncodeWork) -> bool:
        shown = self._shown[chunk.sequence_id]
        if chunk.start == 0:
            shown.run = None
            if (known := self._seen.find(work.mark)) is not None:
                shown.features[chunk.work] = known
            else:
                shown.run = self._tower.begin(_image_tensors(work).read())
        if shown.run is None:
            return False
        rows = self._tower.advance(shown.run, chunk.start, chunk.end)
        if rows is not None:
            if len(rows) != work.end - work.start:
                message = f"{work.end - work.start} placeholders, and features for {len(rows)}"
                raise ValueError(message)
            shown.features[chunk.work], shown.run = rows, None
            self._seen.keep(work.mark, rows)
            self.num_encoded += 1
        return True

    def forward(self, chunks: Sequence[Chunk], token_ids: Sequence["array[int]"]) -> Tensor:
        if not any(chunk.sequence_id in self._shown for chunk in chunks):
            return super().forward(chunks, token_ids)
        batch = pack(chunks, token_ids, self._storage.block_size, self.device)
        batch = replace(batch, positions=self._positions(chunks, batch))
        features = list(self._features(chunks, batch))
        if batch.positions.ndim == 1 and not features:
            return self._hidden(batch)[batch.rows]
        embedded = self._model.embed(batch.token_ids)
        for first, rows in features:
            embedded[first : first + len(rows)] = rows
        hidden: Tensor = self._model.forward_embedded(embedded, self._attention.step(batch))
        self._forget(chunks)
        return hidden[batch.rows]

    def _positions(self, chunks: Sequence[Chunk], batch: Batch) -> Tensor:
        """int64 [3, tokens]; [tokens] where the axes are equal: no image is among the tokens."""
        positions = batch.positions.expand(3, -1).clone()
        for chunk, first in zip(chunks, batch.first_rows.tolist(), strict=True):
            shown = self._shown.get(chunk.sequence_id)
            if shown is None:
                continue
            num = shown.positions.shape[1]
            inside = shown.positions[:, chunk.start : chunk.start + chunk.length]
            end, begun = first + chunk.length, first + inside.shape[1]
            positions[:, first:begun] = inside.to(self.device)
            if chunk.start + chunk.length > num:
                positions[:, begun:end] += shown.shift
        is_plain = bool((positions[0] == positions).all())
        return positions[0].contiguous() if is_plain else positions

    def _features(self, chunks: Sequence[Chunk], batch: Batch) -> Iterator[tuple[int, Tensor]]:
        """Where in the batch rows of an image begin, and those rows."""
        for chunk, first in zip(chunks, batch.first_rows.tolist(), strict=True):
            shown = self._shown.get(chunk.sequence_id)
            for number, work in enumerate(shown.works if shown else ()):
                start = max(chunk.start, work.start)
                end = min(chunk.start + chunk.length, work.end)
                if shown is not None and start < end:
                    rows = shown.features[number][start - work.start : end - work.start]
                    yield first + start - chunk.start, rows

    def _forget(self, chunks: Sequence[Chunk]) -> None:
        """Rows whose last placeholder is computed."""
        for chunk in chunks:
            if (shown := self._shown.get(chunk.sequence_id)) is not None:
                for number, work in enumerate(shown.works):
                    if work.end <= chunk.start + chunk.length:
                        shown.features.pop(number, None)


def _image_tensors(work: EncodeWork) -> ImageTensors:
    return msgspec.msgpack.decode(work.data, type=ImageTensors)
