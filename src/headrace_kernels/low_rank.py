"""Owns low-rank additions to linear layers: y += up (down x), each row by the factors of its slot.

Rows of one slot are taken together, up to _RUN of them, so that its factors are read once for all.
Every sum is over one row's own numbers, in an order that no other row changes.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit
from numba.np.numpy_support import carray
from torch import Tensor

from headrace_kernels.arguments import arguments_of, reader
from headrace_kernels.launch import Kernel, compile_all, parallel
from headrace_kernels.numeric import (
    FAST,
    compiled_as,
    f32_at,
    i32_at,
    i64_at,
    narrow,
    take_next,
    u16_at,
    widen,
)
from headrace_kernels.step import Int32s

MOST_PARTS = 8  # of a layer's outputs that have factors of their own
_RUN = 32  # rows
_DOWN_PIECES, _UP_PIECES = 4, 8  # into which a run's work is cut
_HEAD, _PART = 3, 5  # words of a slot before its parts, and of each of these
_SLOT = _HEAD + _PART * MOST_PARTS


class LowRankPart(NamedTuple):
    """Factors for the outputs [first, first + len(up)) of a layer."""

    first: int
    down: Tensor  # [rank, inputs]
    up: Tensor  # [outputs, rank], scaled


class LowRankLayer:
    """The additions to one linear layer, by slot; an empty slot adds nothing.

    A slot may be set while other slots are computed with.
    """

    def __init__(self, num_slots: int) -> None:
        self.table = np.zeros((num_slots, _SLOT), dtype=np.int64)
        self._held: dict[int, list[Tensor]] = {}

    def put(self, slot: int, parts: Sequence[LowRankPart], dtype: torch.dtype) -> None:
        """The parts follow each other; they are copied, in the form in which kernels read them."""
        assert len(parts) <= MOST_PARTS, "a layer is stacked of few parts"
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
        """The first output of each part, and its factors: [rank, inputs] and [rank, outputs]."""
        down, *ups = self._held.get(slot, [torch.empty(0)])
        ranks = down.split([len(up) for up in ups]) if ups else ()
        for number, (own, up) in enumerate(zip(ranks, ups, strict=True)):
            yield int(self.table[slot, _HEAD + _PART * number]), own, up

    def clear(self, slot: int) -> None:
        self.table[slot] = 0
        self._held.pop(slot, None)


class SlotRows:
    """Which rows of a step belong to which slot; refilled in place for other steps."""

    def __init__(self, most: int) -> None:
        """`most` rows."""
        self.order: Int32s = np.zeros(most, dtype=np.int32)
        self.runs: Int32s = np.zeros(1 + 3 * most, dtype=np.int32)  # their number; slot, rows

    def fill(self, slots: Int32s) -> None:
        """The slot of each row; -1: it has none."""
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
def _books(g: Any) -> Any:
    runs = carray(i32_at(g.runs), 1 + 3 * g.most)
    return carray(i64_at(g.table), (g.slots, _SLOT)), carray(i32_at(g.order), g.most), runs


def _down_by(name: str, at: Any) -> Any:
    @compiled_as(name)
    def down(g: Any, a: Any) -> None:
        """sums[row] = down x[row], a share of the ranks of a run at a time."""
        table, order, runs = _books(g)
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


def _up_by(name: str, at: Any) -> Any:
    @compiled_as(name)
    def up(g: Any, a: Any) -> None:
        """y[row] += up sums[row], a share of the outputs of a run at a time."""
        table, order, runs = _books(g)
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


_down_in_bf16, _down_in_float = _down_by("bf16", u16_at), _down_by("float", f32_at)
_up_in_bf16, _up_in_float = _up_by("bf16", u16_at), _up_by("float", f32_at)


@Kernel
def _down_bf16(a: Any) -> None:
    _down_in_bf16(_read(a), a)


@Kernel
def _down_float(a: Any) -> None:
    _down_in_float(_read(a), a)


@Kernel
def _up_bf16(a: Any) -> None:
    _up_in_bf16(_read(a), a)


@Kernel
def _up_float(a: Any) -> None:
    _up_in_float(_read(a), a)


_KERNELS = {
    torch.bfloat16: (_down_bf16, _up_bf16),
    torch.float32: (_down_float, _up_float),
}


def compile_low_rank(dtype: torch.dtype) -> None:
    """Has their kernels compiled, which takes seconds the first time; any thread may call it."""
    compile_all(_KERNELS[dtype])


def add_low_rank_by_torch(x: Tensor, y: Tensor, by: LowRankLayer, rows: SlotRows) -> None:
    """The same by its formula, on any device."""
    for slot, start, end in rows.runs[1 : 1 + 3 * rows.runs[0]].reshape(-1, 3).tolist():
        own = torch.from_numpy(rows.order[start:end]).to(x.device)
        for first, down, up in by.parts(slot):
            added = x[own].float() @ down.float().T @ up.float()
            y[own, first : first + up.shape[1]] += added.to(y.dtype)


def add_low_rank(x: Tensor, y: Tensor, by: LowRankLayer, rows: SlotRows, width: int) -> None:
    """Adds to y [rows, outputs], contiguous, what the rows' slots add for x [rows, inputs].

    `width`: at least the ranks of all parts of any slot together.
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
    for kernel in _KERNELS[x.dtype]:
        parallel(kernel, arguments_of(*words))
