"""Owns the recordings of small steps, one for each size that has room for chunks and tokens."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.runner.inputs import Batch
from headrace.runner.kernels.chain import chained
from headrace.runner.kernels.pointwise import add
from headrace.runner.kernels.tape import Arena, CannotRecord, Tape, record

_OWN = {torch.ops.aten.add.Tensor: add}
_MAX_TOKENS = 64  # beyond, the work outweighs the calls
_MAX_RECORDINGS = 64
_ARRAYS = ("starts", "lengths", "first_rows")


@dataclass(frozen=True, slots=True)
class _Recording:
    """`batch` lies where the tape reads it."""

    batch: Batch
    tape: Tape
    result: Tensor

    def play(self, batch: Batch) -> Tensor:
        fill(self.batch, batch)
        self.tape.play()
        return self.result


class RecordedForward:
    """A forward pass over a batch that repeats itself where it can.

    `forward` must read nothing of the batch but its tensors' and arrays' contents, and may not
    look at them. block_table_width: blocks of the longest sequence.
    """

    def __init__(self, forward: Callable[[Batch], Tensor], block_table_width: int) -> None:
        self._forward = forward
        self._width = block_table_width
        self._arena = Arena()
        self._recordings: dict[tuple[int, int], _Recording] = {}
        self._is_off = False

    def __call__(self, batch: Batch) -> Tensor:
        """At least as many rows as the batch has tokens; overwritten by the next step."""
        if self._is_off or len(batch.token_ids) > _MAX_TOKENS:
            return self._forward(batch)
        size = _size_for(batch)
        if recording := self._recordings.get(size):
            return recording.play(batch)
        try:
            recording = self._record(batch, *size)
        except CannotRecord:
            self._is_off = True
            return self._forward(batch)
        if len(self._recordings) == _MAX_RECORDINGS:
            del self._recordings[next(iter(self._recordings))]
        self._recordings[size] = recording
        return recording.result

    def _record(self, batch: Batch, num_chunks: int, num_tokens: int) -> _Recording:
        steady = _steady(batch, (num_chunks, self._width), num_tokens)
        fill(steady, batch)
        tape, result = record(lambda: self._forward(steady), self._arena, _OWN)
        tape.rewrite(chained)
        return _Recording(steady, tape, result)


def _size_for(batch: Batch) -> tuple[int, int]:
    """Chunks and tokens of the recording: few sizes, with what is left over computed in vain.

    Rows of a product are computed by fours anyway, and an empty chunk costs next to nothing.
    """
    chunks, tokens = len(batch.lengths), len(batch.token_ids)
    return 1 << (chunks - 1).bit_length(), tokens if tokens < 3 else -(-tokens // 4) * 4


def _steady(batch: Batch, table_shape: tuple[int, int], num_tokens: int) -> Batch:
    """Of the given size, all chunks empty."""
    num_chunks = table_shape[0]
    arrays: dict[str, Any] = {name: np.zeros(num_chunks, dtype=np.int32) for name in _ARRAYS}
    return replace(
        batch,
        token_ids=batch.token_ids.new_zeros(num_tokens),
        positions=batch.positions.new_zeros(num_tokens),
        block_table=np.zeros(table_shape, dtype=np.int32),
        **arrays,
    )


def fill(steady: Batch, batch: Batch) -> None:
    """Another step in the same memory; its chunks come first, those after them are empty."""
    chunks, tokens = len(batch.lengths), len(batch.token_ids)
    steady.token_ids[:tokens] = batch.token_ids
    steady.positions[:tokens] = batch.positions
    for name in _ARRAYS:
        array = getattr(steady, name)
        array[:chunks], array[chunks:] = getattr(batch, name), 0
    steady.block_table[:chunks, : batch.block_table.shape[1]] = batch.block_table
