"""Owns the attention of long chunks, once written: what they see is laid out span by span.

Each span gives weighed values and the logarithms of their sums of weights, by which spans are
merged as if there had been one (online softmax, Milakov and Gimelshein, 2018).
"""

from typing import Any

import torch
from numba import njit
from numba.np.numpy_support import carray
from torch import Tensor

from headrace.runner.inputs import Batch
from headrace.runner.kernels.blocks import key_at, per_word, value_at
from headrace.runner.kernels.frame import (
    BLOCK_SIZE,
    DIM,
    FRAME_SIZE,
    KV_HEADS,
    WINDOW,
    chunks_of,
    memory_bf16,
)
from headrace.runner.kernels.numeric import take_next, u16_at
from headrace.runner.kernels.pool import Frame, Kernel, spread
from headrace.runner.kernels.private import attend_masked

_SPAN = 2048  # keys laid out at a time
_TILE = 128  # queries at a time among a chunk's own keys, half of which each must not see
_HIDDEN = -1e30  # finite: a span of which a query sees nothing weighs nothing in the merger

# After the frame of the attention itself:
(CHUNK, BASE, TOTAL, SPAN_KEYS, SPAN_VALUES, GATHER_SIZE) = range(FRAME_SIZE, FRAME_SIZE + 6)

Part = tuple[Tensor, Tensor]
"""Weighed values [kv_heads, rows, dim], logarithms of the sums of weights [kv_heads, rows]."""


@njit
def _lay_out(g: Any, memory: Any, past: Any, block: int, head: int, span: Any) -> None:
    """Positions [span) of one block."""
    size, dim, per = g[BLOCK_SIZE], g[DIM], per_word(memory[0], g[DIM])
    keys, values = memory[0][block, head], memory[1][block, head]
    for position in range(span[0], span[1]):
        offset, row = position % size, position - g[BASE]
        for i in range(dim):
            past[0][head, row, i] = keys[key_at(offset, i, size, per)]
            past[1][head, row, i] = values[value_at(offset, i, dim, per)]


@njit
def _gather(g: Any, a: Any, memory: Any, past: Any) -> None:
    """A piece of work is one block of one kv head; `BASE` is the first position of a block."""
    table = chunks_of(g)[3]
    chunk, base, total = g[CHUNK], g[BASE], g[TOTAL]
    heads, size = g[KV_HEADS], g[BLOCK_SIZE]
    num_blocks = (total - base + size - 1) // size
    while True:
        piece: int = take_next(a)
        if piece >= num_blocks * heads:
            break
        head, number = piece // num_blocks, base // size + piece % num_blocks
        span = (number * size, min(number * size + size, total))
        _lay_out(g, memory, past, table[chunk, number], head, span)


@njit
def _span_bf16(g: Any) -> Any:
    shape = (g[KV_HEADS], g[TOTAL] - g[BASE], g[DIM])
    return carray(u16_at(g[SPAN_KEYS]), shape), carray(u16_at(g[SPAN_VALUES]), shape)


@Kernel
def _gather_bf16(a: Any) -> None:
    g = carray(a, GATHER_SIZE)
    _gather(g, a, memory_bf16(g), _span_bf16(g))


class LongChunk:
    """One chunk of a step, layer after layer.

    A row is a query of one head; the rows that share a head of keys lie together.
    """

    def __init__(self, batch: Batch, number: int) -> None:
        self._number = number
        self._start, self._length = int(batch.starts[number]), int(batch.lengths[number])
        first_row = int(batch.first_rows[number])
        self._tokens = slice(first_row, first_row + self._length)
        self._masks: dict[tuple[int, int, int], Tensor] = {}

    def attend(self, frame: Frame, q: Tensor, out: Tensor, sinks: Tensor | None) -> None:
        """q, out: [tokens, heads, dim] of the whole step; `frame` has the layer's other tensors."""
        kv_heads, size = frame[KV_HEADS], frame[BLOCK_SIZE]
        rows = self._by_head(q, kv_heads)
        queries = torch.empty(rows.shape, dtype=torch.bfloat16).copy_(rows).flatten(1, 2)
        target, group = self._by_head(out, kv_heads), rows.shape[2]
        own, end = self._start // size * size, self._start + self._length
        past = self._past(frame, queries, own)
        keys, values = self._lay_out(frame, own, end)
        mask = self._mask(own, end, frame[WINDOW], group)
        for first in range(0, self._length, _TILE):
            stop = min(first + _TILE, self._length)
            tile, seen = slice(first * group, stop * group), slice(self._start + stop - own)
            part = attend_masked(queries[:, tile], keys[:, seen], values[:, seen], mask[tile, seen])
            if past is not None:
                part = _merged(part, (past[0][:, tile], past[1][:, tile]))
            if sinks is not None:
                part = _sunk(part, sinks, group)
            target[:, first:stop] = part[0].view(target[:, first:stop].shape)

    def _by_head(self, x: Tensor, kv_heads: int) -> Tensor:
        """The chunk's share of x, seen as [kv_heads, length, group, dim]."""
        return x[self._tokens].view(self._length, kv_heads, -1, x.shape[2]).transpose(0, 1)

    def _past(self, frame: Frame, queries: Tensor, stop: int) -> Part | None:
        """All visible positions below `stop`; None if there are none."""
        size, window = frame[BLOCK_SIZE], frame[WINDOW]
        base = max(0, self._start + 1 - window) // size * size if window else 0
        group, past = queries.shape[1] // self._length, None
        for first in range(base, stop, _SPAN):
            end = min(first + _SPAN, stop)
            mask = self._mask(first, end, window, group) if window else None
            part = attend_masked(queries, *self._lay_out(frame, first, end), mask)
            past = part if past is None else _merged(past, part)
        return past

    def _lay_out(self, frame: Frame, first: int, stop: int) -> tuple[Tensor, Tensor]:
        """Keys and values of positions [first, stop), [kv_heads, positions, dim]."""
        shape = (2, frame[KV_HEADS], stop - first, frame[DIM])
        span = torch.empty(shape, dtype=torch.bfloat16)
        frame[CHUNK], frame[BASE], frame[TOTAL] = self._number, first, stop
        frame[SPAN_KEYS], frame[SPAN_VALUES] = span[0].data_ptr(), span[1].data_ptr()
        spread(_gather_bf16, frame)
        return span[0], span[1]

    def _mask(self, first: int, stop: int, window: int, group: int) -> Tensor:
        """[rows, keys of a span], added to scores: most layers of a step have the same."""
        if (first, stop, window) not in self._masks:
            own = torch.arange(self._start, self._start + self._length)[:, None]
            other = torch.arange(first, stop)
            hidden = other > own
            if window:
                hidden |= other <= own - window
            mask = torch.zeros(hidden.shape).masked_fill_(hidden, _HIDDEN)
            self._masks[first, stop, window] = mask.repeat_interleave(group, dim=0)
        return self._masks[first, stop, window]


def _merged(left: Part, right: Part) -> Part:
    share = torch.sigmoid(right[1] - left[1])[:, :, None]
    return left[0].lerp(right[0], share.to(left[0].dtype)), torch.logaddexp(left[1], right[1])


def _sunk(part: Part, sinks: Tensor, group: int) -> Part:
    """With one more score per head that holds no value; sinks: float32 [heads]."""
    by_row = sinks.view(-1, group).repeat(1, part[1].shape[1] // group)
    share = torch.sigmoid(part[1] - by_row)[:, :, None]
    return part[0] * share.to(part[0].dtype), part[1]
