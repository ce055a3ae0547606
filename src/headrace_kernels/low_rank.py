"""Adds low-rank products to linear layers: y += up (down x), with different factors for each slot.

A slot holds the factors of one adapter, and a row may belong to a slot. Rows of one slot are
processed in runs of up to _RUN rows, so that the factors are read once for all rows of a run. Each
sum uses the numbers of only one row, in an order that does not depend on other rows.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit
from numba.np.numpy_support import carray
from torch import Tensor

from headrace_kernels.arguments import arguments_of, reader
from headrace_kernels.launch import compile_all, for_each_type, parallel
from headrace_kernels.numeric import FAST, f32_at, i32_at, i64_at, narrow, take_next, widen
from headrace_kernels.step import Int32s

# The maximum number of parts of a layer's outputs that have separate factors.
MOST_PARTS = 8
_RUN = 32  # maximum number of rows in a run
# How many pieces of work each of the two products of a run has.
_DOWN_PIECES, _UP_PIECES = 4, 8
# A slot starts with _HEAD words, and each part of the slot has _PART words.
_HEAD, _PART = 3, 5
_SLOT = _HEAD + _PART * MOST_PARTS


class LowRankPart(NamedTuple):
    """Factors for the outputs [first, first + len(up)) of a layer."""

    first: int
    down: Tensor  # [rank, inputs]
    up: Tensor  # [outputs, rank], already scaled


class LowRankLayer:
    """The low-rank factors of one linear layer, by slot; an empty slot adds nothing.

    A slot may be changed while a kernel computes with other slots.
    """

    def __init__(self, num_slots: int) -> None:
        self.table = np.zeros((num_slots, _SLOT), dtype=np.int64)
        self._held: dict[int, list[Tensor]] = {}

    def put(self, slot: int, parts: Sequence[LowRankPart], dtype: torch.dtype) -> None:
        """Store the factors of a slot as copies in the layout that kernels read."""
        assert len(parts) <= MOST_PARTS, "a layer has too many parts"
        down = torch.cat([part.down for part in parts]).to(dtype).contiguous()
        ups = [part.up.T.to(dtype).contiguous() for part in parts]  # [rank, outputs]
        words = [len(down), down.data_ptr(), len(parts)]
        first_rank = 0
        for part, up in zip(parts, ups, strict=True):
            words += [part.first, up.shape[1], first_rank, len(up), up.data_ptr()]
            first_rank += len(up)
        self._held[slot] = [down, *ups]
        self.table[slot, : len(words)] = words

    def parts(self, slot: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield each part's first output and two factors, [rank, inputs] and [rank, outputs]."""
        down, *ups = self._held.get(slot, [torch.empty(0)])
        ranks = down.split([len(up) for up in ups]) if ups else ()
        for number, (own, up) in enumerate(zip(ranks, ups, strict=True)):
            yield int(self.table[slot, _HEAD + _PART * number]), own, up

    def clear(self, slot: int) -> None:
        self.table[slot] = 0
        self._held.pop(slot, None)


class SlotRows:
    """The rows of a step grouped by slot. The arrays are refilled in place for each step."""

    def __init__(self, most: int) -> None:
        """Allocate the arrays for up to `most` rows."""
        self.order: Int32s = np.zeros(most, dtype=np.int32)
        # The number of runs; then for each run its slot and its range in `order`.
        self.runs: Int32s = np.zeros(1 + 3 * most, dtype=np.int32)

    def fill(self, slots: Int32s) -> None:
        """Group the rows by slot.

        slots: the slot of each row; -1 means that the row has no slot.
        """
        runs: list[int] = []
        first = 0
        for slot in np.unique(slots[slots >= 0]).tolist():
            rows = np.flatnonzero(slots == slot)
            end = first + len(rows)
            self.order[first:end] = rows
            for start in range(first, end, _RUN):
                runs += [slot, start, min(start + _RUN, end)]
            first = end
        self.runs[0] = len(runs) // 3
        self.runs[1 : 1 + len(runs)] = runs


class _LowRank(NamedTuple):
    rows: int
    inputs: int
    outputs: int
    width: int
    slots: int
    x: int
    sums: int
    y: int
    table: int
    order: int
    most: int
    runs: int


_read = reader(_LowRank)


@njit(fastmath=FAST)
def _dot(x: Any, w: Any) -> Any:
    total = np.float32(0)
    for k in range(x.size):
        total += widen(x[k]) * widen(w[k])
    return total


@njit(fastmath=FAST)
def _add_scaled(sums: Any, by: Any, w: Any) -> None:
    for n in range(w.size):
        sums[n] += by * widen(w[n])


@njit(fastmath=FAST)
def _add_to(y: Any, sums: Any) -> None:
    for n in range(y.size):
        y[n] = narrow(widen(y[n]) + sums[n], y[0])


@njit
def _tables_of(g: Any) -> Any:
    runs = carray(i32_at(g.runs), 1 + 3 * g.most)
    return carray(i64_at(g.table), (g.slots, _SLOT)), carray(i32_at(g.order), g.most), runs


def _down_kernel(at: Any) -> Any:
    def down(a: Any) -> None:
        """Compute sums[row] = down x[row]. A piece of work is a part of the ranks for one run."""
        g = _read(a)
        table, order, runs = _tables_of(g)
        x, sums = carray(at(g.x), (g.rows, g.inputs)), carray(f32_at(g.sums), (g.rows, g.width))
        while True:
            piece = take_next(a)
            if piece >= runs[0] * _DOWN_PIECES:
                break
            run, share = 1 + 3 * (piece // _DOWN_PIECES), piece % _DOWN_PIECES
            own = table[runs[run]]
            rank = own[0]
            factors = carray(at(own[1]), (rank, g.inputs))
            for j in range(rank * share // _DOWN_PIECES, rank * (share + 1) // _DOWN_PIECES):
                for i in range(runs[run + 1], runs[run + 2]):
                    sums[order[i], j] = _dot(x[order[i]], factors[j])

    return down


def _up_kernel(at: Any) -> Any:
    def up(a: Any) -> None:
        """Compute y[row] += up sums[row]. A piece of work is a part of the outputs for one run."""
        g = _read(a)
        table, order, runs = _tables_of(g)
        y, sums = carray(at(g.y), (g.rows, g.outputs)), carray(f32_at(g.sums), (g.rows, g.width))
        size = (g.outputs + _UP_PIECES - 1) // _UP_PIECES
        wide = np.empty(size, np.float32)
        while True:
            piece = take_next(a)
            if piece >= runs[0] * _UP_PIECES:
                break
            run, share = 1 + 3 * (piece // _UP_PIECES), piece % _UP_PIECES
            own = table[runs[run]]
            for part in range(own[2]):
                words = own[_HEAD + _PART * part : _HEAD + _PART * (part + 1)]
                first, num, first_rank, rank = words[0], words[1], words[2], words[3]
                begin, end = max(share * size, first), min((share + 1) * size, first + num)
                if begin >= end:
                    continue
                factors, total = carray(at(words[4]), (rank, num)), wide[: end - begin]
                for i in range(runs[run + 1], runs[run + 2]):
                    row, total[:] = order[i], np.float32(0)
                    for j in range(rank):
                        by = sums[row, first_rank + j]
                        _add_scaled(total, by, factors[j, begin - first : end - first])
                    _add_to(y[row, begin:end], total)

    return up


_DOWN, _UP = for_each_type(_down_kernel), for_each_type(_up_kernel)


def compile_low_rank(dtype: torch.dtype) -> None:
    """Compile the kernels of `add_low_rank`. The first compilation takes seconds.

    Any thread may call this function.
    """
    compile_all((_DOWN[dtype], _UP[dtype]))


def add_low_rank_by_torch(x: Tensor, y: Tensor, by: LowRankLayer, rows: SlotRows) -> None:
    """Compute the same as `add_low_rank` with torch, on any device."""
    for slot, start, end in rows.runs[1 : 1 + 3 * rows.runs[0]].reshape(-1, 3).tolist():
        own = torch.from_numpy(rows.order[start:end]).to(x.device)
        for first, down, up in by.parts(slot):
            added = x[own].float() @ down.float().T @ up.float()
            y[own, first : first + up.shape[1]] += added.to(y.dtype)


def add_low_rank(x: Tensor, y: Tensor, by: LowRankLayer, rows: SlotRows, width: int) -> None:
    """Add the low-rank products of the rows of x [rows, inputs] to y [rows, outputs].

    `rows` has the slots of the rows, and `by` has the slots' factors. y is contiguous. width: at
    least the total rank of all parts of any slot.
    """
    x = x.contiguous()
    sums = torch.empty((len(x), width), dtype=torch.float32)
    words = _LowRank(
        rows=len(x),
        inputs=x.shape[1],
        outputs=y.shape[1],
        width=width,
        slots=len(by.table),
        x=x.data_ptr(),
        sums=sums.data_ptr(),
        y=y.data_ptr(),
        table=by.table.ctypes.data,
        order=rows.order.ctypes.data,
        most=len(rows.order),
        runs=rows.runs.ctypes.data,
    )
    for kernel in (_DOWN[x.dtype], _UP[x.dtype]):
        parallel(kernel, arguments_of(*words))
