"""Runs the MTP layer of a native model over its own KV blocks, from the model's hidden states."""

import logging
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace_common.cache import ModelCache
from headrace_common.checkpoints.headers import TensorHeader, mtp_side, read_headers
from headrace_common.checkpoints.spec import ModelSpec
from headrace_common.ids import SequenceId
from headrace_common.layout import MemoryLayout
from headrace_common.plan import BlockCopy, Chunk, SlotCopy
from headrace_engine.models.qwen3_5_mtp import Qwen35Mtp
from headrace_engine.models.registry import family, has_head, is_native
from headrace_engine.runner.inputs import pack
from headrace_engine.runner.lanes.lane import LaneOptions
from headrace_engine.runner.lanes.native_text import NativeText, attention_of, load_model
from headrace_engine.runner.storage import CacheStorage
from headrace_engine.weights.weights import sources_of

logger = logging.getLogger(__name__)

# How many hidden states are kept for each sequence. A token is read at most 64 steps after it was
# drawn, unless several sequences have to catch up at the same time.
_NUM_KEPT = 128


class MtpLane:
    """The MTP layer of a model, as a small draft model with one layer.

    At position i, the layer reads token i and the model's hidden state of position i - 1. In
    training, this pair has position i - 1, but only distances between positions matter. With
    position i, a block of the cache depends only on the tokens up to the block's end, as in every
    other model. So blocks can be shared.

    Zeros replace an unknown hidden state: before token 0, after a prefix from the cache, and if
    the layer was too many tokens behind.
    """

    def __init__(
        self,
        spec: ModelSpec,
        dtype: torch.dtype,
        device: torch.device,
        options: LaneOptions,
        served: NativeText,
    ) -> None:
        """Load the MTP layer of `served`, which must have one (see `mtp_layer`)."""
        model, headers = _mtp_layer(spec)
        self._model = model
        self.num_parameters = sum(p.numel() for p in model.parameters())
        self.spec, self.device, self.dtype = spec, device, dtype
        self._served, self._instructions = served, options.instructions
        self.weight_bytes = load_model(model, spec, dtype, device, options, headers)
        self._size = model.norm.weight.shape[0]
        self._past: dict[SequenceId, _PastStates] = {}

    @staticmethod
    def cache_of(spec: ModelSpec) -> ModelCache:
        cache: ModelCache = _mtp_layer(spec)[0].cache
        return cache

    @property
    def storage(self) -> CacheStorage | None:
        return self._storage if self.device.type == "cpu" else None

    def open(self, layout: MemoryLayout) -> None:
        self._storage = CacheStorage(self._model.cache, layout, self.dtype, self.device)
        self._attention = attention_of(self._storage, self._model.sinks, self._instructions)

    def copy(self, blocks: Sequence[BlockCopy], slots: Sequence[SlotCopy]) -> None:
        for each in blocks:
            self._storage.copy_block(each.source, each.target)

    def forward(self, chunks: Sequence[Chunk], token_ids: Sequence["array[int]"]) -> Tensor:
        """Process the chunks; return the hidden state of the last token of each chunk with a row.

        This hidden state replaces the model's own until the model has processed the token.
        """
        hidden = [
            self.past(chunk.sequence_id).get(chunk.start - 1, chunk.start + chunk.length - 1)
            for chunk in chunks
        ]
        rows = self.read(chunks, token_ids, torch.cat(hidden))
        drafting = [chunk for chunk in chunks if chunk.num_rows]
        for chunk, row in zip(drafting, rows, strict=True):
            self.past(chunk.sequence_id).put(chunk.start + chunk.length - 1, row[None])
        return rows

    def read(
        self, chunks: Sequence[Chunk], token_ids: Sequence["array[int]"], hidden: Tensor
    ) -> Tensor:
        """Process the chunks; `hidden` has the hidden state of the position before each token."""
        batch = pack(chunks, token_ids, self._storage.block_size, self.device)
        embedded = self._served.embed(batch.token_ids)
        out: Tensor = self._model(embedded, hidden, self._attention.step(batch))
        return out[batch.rows]

    def logits(self, rows: Tensor) -> Tensor:
        return self._served.logits(rows)

    def past(self, sequence_id: SequenceId) -> "_PastStates":
        """Return the hidden states that are stored for a sequence."""
        if sequence_id not in self._past:
            self._past[sequence_id] = _PastStates(self._size, self.dtype)
        return self._past[sequence_id]

    def end(self, sequence_id: SequenceId) -> None:
        """Release the hidden states of a sequence."""
        self._past.pop(sequence_id, None)


class _PastStates:
    """The hidden states of a sequence's last positions; position p is in row p % _NUM_KEPT."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self._rows = torch.zeros(_NUM_KEPT, size, dtype=dtype)
        # The position in each row; -2 if there is none.
        self._positions = np.full(_NUM_KEPT, -2)

    def put(self, start: int, rows: Tensor) -> None:
        """Keep the hidden states of positions `start` and up; the oldest are overwritten."""
        end = start + len(rows)
        positions = np.arange(max(start, end - _NUM_KEPT), end)
        places = positions % _NUM_KEPT
        self._positions[places] = positions
        self._rows[torch.from_numpy(places)] = rows[len(rows) - len(positions) :]

    def get(self, start: int, end: int) -> Tensor:
        """Return the hidden states of the positions [start, end), with zeros for unknown ones."""
        positions = np.arange(start, end)
        places = positions % _NUM_KEPT
        known = torch.from_numpy(self._positions[places] == positions)
        return self._rows[torch.from_numpy(places)] * known[:, None]


def mtp_layer(spec: ModelSpec) -> Any | None:
    """Return a model's MTP layer, still without weights; None if the layer cannot be used."""
    model_class = family(spec.architecture) if is_native(spec.architecture) else None
    if not hasattr(model_class, "with_one_layer") or not has_head(spec.architecture):
        return None
    model, headers = _mtp_layer(spec)
    expected = {
        source for name, _ in model.named_parameters() for source in sources_of(name, model.weights)
    }
    if headers and headers.keys() != expected:
        example = min(headers.keys() ^ expected)
        logger.info(
            "The MTP layers of %s are not used. Only a single layer with the tensors of "
            "Qwen3.5's MTP layer is supported, and %s is missing or unknown.",
            *(spec.name, example),
        )
    return model if headers.keys() == expected else None


def _mtp_layer(spec: ModelSpec) -> tuple[Any, dict[str, TensorHeader]]:
    """Return the layer without weights, and its tensors in the model's files."""
    model_class = family(spec.architecture)
    with torch.device("meta"):
        model = Qwen35Mtp(model_class(model_class.with_one_layer(model_class.read(spec.config))))
    return model, mtp_side(read_headers(spec))
