"""Owns the recordings of small steps, one for each number of chunks and of tokens."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from headrace.runner.inputs import Batch
from headrace.runner.kernels.pointwise import add
from headrace.runner.kernels.tape import Arena, CannotRecord, Tape, record

_OWN = {torch.ops.aten.add.Tensor: add}
_MAX_TOKENS = 16  # beyond, the work outweighs the calls; all chunks are short ones
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
        """The result is overwritten by the next step."""
        size = len(batch.lengths), len(batch.token_ids)
        if self._is_off or size[1] > _MAX_TOKENS:
            return self._forward(batch)
        if recording := self._recordings.get(size):
            return recording.play(batch)
        try:
            recording = self._record(batch)
        except CannotRecord:
            self._is_off = True
            return self._forward(batch)
        if len(self._recordings) == _MAX_RECORDINGS:
            del self._recordings[next(iter(self._recordings))]
        self._recordings[size] = recording
        return recording.result

    def _record(self, batch: Batch) -> _Recording:
        steady = _steady(batch, self._width)
        tape, result = record(lambda: self._forward(steady), self._arena, _OWN)
        return _Recording(steady, tape, result)


def _steady(batch: Batch, width: int) -> Batch:
    """A copy whose block table has room for any sequence."""
    table = np.zeros((len(batch.lengths), width), dtype=np.int32)
    table[:, : batch.block_table.shape[1]] = batch.block_table
    tensors = {name: getattr(batch, name).clone() for name in ("token_ids", "positions")}
    arrays = {name: getattr(batch, name).copy() for name in _ARRAYS}
    return replace(batch, block_table=table, **arrays, **tensors)


def fill(steady: Batch, batch: Batch) -> None:
    """Another step of as many chunks and tokens in the same memory."""
    steady.token_ids.copy_(batch.token_ids)
    steady.positions.copy_(batch.positions)
    for name in _ARRAYS:
        getattr(steady, name)[:] = getattr(batch, name)
    steady.block_table[:, : batch.block_table.shape[1]] = batch.block_table
