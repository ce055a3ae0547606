"""Owns attention of chunks of a few tokens over their block tables, and writing their positions.

One pass over the cache for all queries of a chunk: softmax is kept as a running maximum and sum.
"""

from typing import Any

import numpy as np
import torch
from numba import njit
from numba.np.numpy_support import carray

from headrace.runner.kernels.frame import (
    BLOCK_SIZE,
    DIM,
    FRAME_SIZE,
    GROUP,
    KV_HEADS,
    NUM_SINKS,
    SINKS,
    WINDOW,
    chunks_of,
    first_visible,
    memory_bf16,
    memory_float,
    new_bf16,
    new_float,
)
from headrace.runner.kernels.numeric import (
    FAST,
    f32_at,
    fast_exp,
    largest,
    narrow,
    take_next,
    widen,
)
from headrace.runner.kernels.pool import Kernel
from headrace.runner.kernels.tiles import STEP, dot_tile, in_order, mix_tile, place

LOWEST = np.float32(-1e30)  # below every score, and far from overflow
_SPAN = 256  # positions whose scores are weighed together
_dot_4x4, _dot_4x2, _dot_4x1 = dot_tile(4, 4), dot_tile(4, 2), dot_tile(4, 1)


@njit(fastmath=FAST, inline="always")
def _scores(q: Any, keys: Any, ahead: int, out: Any, start: int) -> None:
    """out [heads, start:] = products of heads with the keys of one block, all of them."""
    if q.shape[1] % STEP == 0 and keys.shape[0] % 4 == 0:
        _scores_by_tiles(q, keys, ahead, out, start)
        return
    for g in range(q.shape[0]):
        for j in range(keys.shape[0]):
            total = np.float32(0)
            for i in range(q.shape[1]):
                total += widen(keys[j, i]) * q[g, i]
            out[g, start + j] = total


@njit(inline="always")
def _scores_by_tiles(q: Any, keys: Any, ahead: int, out: Any, start: int) -> None:
    heads = q.shape[0]
    for j in range(0, keys.shape[0], 4):
        g = 0
        while g + 4 <= heads:
            _dot_4x4(keys, q, out, (j, g, start + j), ahead)
            g += 4
        if g + 2 <= heads:
            _dot_4x2(keys, q, out, (j, g, start + j), ahead)
            g += 2
        if g < heads:
            _dot_4x1(keys, q, out, (j, g, start + j), ahead)


def _mixer(num_steps: int) -> Any:
    """So many steps of columns, for all heads."""
    mix_4, mix_2, mix_1 = (mix_tile(num_heads, num_steps) for num_heads in (4, 2, 1))

    @njit(inline="always")
    def mix(weights: Any, values: Any, column: int, ahead: int, acc: Any) -> None:
        g = 0
        while g + 4 <= acc.shape[0]:
            mix_4(values, weights, acc, (column, g), ahead)
            g += 4
        if g + 2 <= acc.shape[0]:
            mix_2(values, weights, acc, (column, g), ahead)
            g += 2
        if g < acc.shape[0]:
            mix_1(values, weights, acc, (column, g), ahead)

    return mix


_mix_two_steps, _mix_step = _mixer(2), _mixer(1)


@njit(fastmath=FAST, inline="always")
def _accumulate(weights: Any, values: Any, ahead: int, acc: Any) -> None:
    """acc [heads, dim] += weights [heads, values] times values [values, dim]."""
    dim = acc.shape[1]
    if dim % STEP == 0:
        for column in range(0, dim - STEP, 2 * STEP):
            _mix_two_steps(weights, values, column, ahead, acc)
        if dim % (2 * STEP):
            _mix_step(weights, values, dim - STEP, ahead, acc)
        return
    for g in range(acc.shape[0]):
        for j in range(values.shape[0]):
            for i in range(dim):
                acc[g, i] += weights[g, j] * widen(values[j, i])


@njit(fastmath=FAST)
def _weigh(scores: Any, acc: Any, running: Any) -> None:
    """Scores become weights against the largest score so far; acc and sum shrink along with it."""
    top = largest(scores, running[0])
    shrink = fast_exp(running[0] - top)
    total = np.float32(0)
    for j in range(scores.size):
        scores[j] = fast_exp(scores[j] - top)
    for j in range(scores.size):
        total += scores[j]
    for i in range(acc.size):
        acc[i] *= shrink
    running[0] = top
    running[1] = running[1] * shrink + total


@njit(inline="always")
def _apart(here: Any, there: Any) -> int:
    """Bytes between two blocks, the second a page that nothing else foresees."""
    apart: int = there.ctypes.data - here.ctypes.data
    return apart


@njit
def _weigh_visible(row: Any, visible: Any, acc: Any, running: Any) -> None:
    """The row's scores [visible) become weights, all others 0."""
    low, high = visible
    if low < high:
        _weigh(row[low:high], acc, running)
    row[:low] = 0
    row[max(low, high) :] = 0


@njit
def _take(q: Any, memory: Any, table: Any, span: Any, state: Any, sight: Any) -> None:
    """Adds positions [span) of one kv head's past: all their scores first, then all values.

    `sight`: the first query's position, the heads per query, and how far back each one sees.
    """
    (keys, values, kv), (first, stop), (scores, acc, running) = memory, span, state
    position, group, window = sight
    size = keys.shape[2]
    blocks = range(first // size, (stop + size - 1) // size)
    base = blocks.start * size
    for number in blocks:
        block = keys[table[number], kv]
        is_last = number + 1 == blocks.stop
        after = values[table[blocks.start], kv] if is_last else keys[table[number + 1], kv]
        _scores(q, block, _apart(block, after), scores, number * size - base)
    for g in range(q.shape[0]):
        own = position + g // group
        low, high = max(first, first_visible(own, window)), min(stop, own + 1)
        _weigh_visible(scores[g, : stop - base], (low - base, high - base), acc[g], running[g])
    for number in blocks:
        start = number * size
        low, high = max(first, start), min(stop, start + size)
        block = values[table[number], kv]
        after = values[table[min(number + 1, blocks.stop - 1)], kv]
        part, weights = block[low - start : high - start], scores[:, low - base : high - base]
        _accumulate(weights, part, _apart(block, after), acc)


@njit(fastmath=FAST)
def _attend(q: Any, memory: Any, table: Any, sight: Any, tops: Any, out: Any) -> None:
    """Queries [queries * heads of one kv head, dim] over their sequence's blocks, to `out`.

    `memory`: keys and values [num_blocks, kv_heads, block_size, dim], and which kv head. `tops`
    holds the heads' sinks, scores without a value, or is empty. out [queries, heads * dim].
    """
    position, group, window = sight
    acc = np.zeros(q.shape, np.float32)
    scores = np.empty((q.shape[0], _SPAN + 2 * memory[0].shape[2]), np.float32)
    running = np.zeros((q.shape[0], 2), np.float32)
    for g in range(q.shape[0]):
        running[g, 0] = tops[g % group] if tops.size else LOWEST
        running[g, 1] = np.float32(1) if tops.size else np.float32(0)
    first, stop = first_visible(position, window), position + out.shape[0]
    while first < stop:
        end = min(stop, (first // _SPAN + 1) * _SPAN)
        _take(q, memory, table, (first, end), (scores, acc, running), sight)
        first = end
    dim, is_paired = q.shape[1], _is_paired(memory[0])
    for g in range(q.shape[0]):
        inverse = np.float32(1) / running[g, 1]
        row = out[g // group, g % group * dim : (g % group + 1) * dim]
        for i in range(dim):
            value = acc[g, place(i) if is_paired else i]
            row[i] = narrow(value * inverse, row[0])


@njit
def _is_paired(keys: Any) -> bool:
    """Whether queries and sums lie in the order of the tiles: even and odd numbers apart."""
    return keys.itemsize == 2 and keys.shape[3] % STEP == 0


@njit(fastmath=FAST)
def _scaled(rows: Any, group: int, keys: Any) -> Any:
    """One kv head's queries as float32 [queries * group, dim], the scale of the scores in them."""
    dim = keys.shape[3]
    scale = np.float32(1) / np.sqrt(np.float32(dim))
    q = np.empty((rows.shape[0] * group, dim), np.float32)
    for g in range(q.shape[0]):
        row = rows[g // group, g % group * dim : (g % group + 1) * dim]
        for i in range(dim):
            q[g, i] = widen(row[i]) * scale
    return in_order(q, True) if _is_paired(keys) else q


@njit
def _write(row: Any, new: Any) -> None:
    for i in range(row.size):
        row[i] = new[i]


@njit
def _attend_short(g: Any, a: Any, new: Any, memory: Any, chunks: Any) -> None:
    """A piece of work is one kv head of one chunk: its positions are written, then it attends."""
    q, k, v, out = new
    keys, values = memory
    which, starts, lengths, first_rows, table = chunks
    kv_heads, size, dim, group = g[KV_HEADS], g[BLOCK_SIZE], g[DIM], g[GROUP]
    sinks = carray(f32_at(g[SINKS]), g[NUM_SINKS])
    while True:
        piece: int = take_next(a)
        if piece >= which.size * kv_heads:
            break
        chunk, kv = which[piece // kv_heads], piece % kv_heads
        start, first_row = starts[chunk], first_rows[chunk]
        stop_row = first_row + lengths[chunk]
        for row in range(first_row, stop_row):
            position = start + row - first_row
            block, offset = table[chunk, position // size], position % size
            _write(keys[block, kv, offset], k[row, kv * dim : (kv + 1) * dim])
            _write(values[block, kv, offset], v[row, kv * dim : (kv + 1) * dim])
        heads = slice(kv * group * dim, (kv + 1) * group * dim)
        _attend(
            _scaled(q[first_row:stop_row, heads], group, keys),
            (keys, values, kv),
            table[chunk],
            (start, group, g[WINDOW]),
            sinks[kv * group : (kv + 1) * group] if sinks.size else sinks,
            out[first_row:stop_row, heads],
        )


@Kernel
def _short_bf16(a: Any) -> None:
    g = carray(a, FRAME_SIZE)
    _attend_short(g, a, new_bf16(g), memory_bf16(g), chunks_of(g))


@Kernel
def _short_float(a: Any) -> None:
    g = carray(a, FRAME_SIZE)
    _attend_short(g, a, new_float(g), memory_float(g), chunks_of(g))


SHORT_CHUNKS = {torch.bfloat16: _short_bf16, torch.float32: _short_float}
"""By the cache's dtype; the frame is that of frame.py, with the short chunks in `WHICH`."""
