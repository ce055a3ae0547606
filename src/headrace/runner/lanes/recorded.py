"""Owns the recordings of decode steps, one for each number of streams; all else runs as it is."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from headrace.runner.inputs import Batch
from headrace.runner.kernels.pointwise import add
from headrace.runner.kernels.tape import Arena, CannotRecord, Tape, record

_OWN = {torch.ops.aten.add.Tensor: add}
_MAX_STREAMS = 16  # beyond, the work outweighs the calls


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
        self._recordings: dict[int, _Recording] = {}
        self._is_off = False

    def __call__(self, batch: Batch) -> Tensor:
        """The result is overwritten by the next step."""
        num = len(batch.lengths)
        if self._is_off or num > _MAX_STREAMS or (batch.lengths != 1).any():
            return self._forward(batch)
        if recording := self._recordings.get(num):
            return recording.play(batch)
        try:
            recording = self._record(batch)
        except CannotRecord:
            self._is_off = True
            return self._forward(batch)
        self._recordings[num] = recording
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
    return replace(batch, block_table=table, starts=batch.starts.copy(), **tensors)


def fill(steady: Batch, batch: Batch) -> None:
    """Another step of as many streams in the same memory; lengths and rows are equal in both."""
    steady.token_ids.copy_(batch.token_ids)
    steady.positions.copy_(batch.positions)
    steady.starts[:] = batch.starts
    steady.block_table[:, : batch.block_table.shape[1]] = batch.block_table
