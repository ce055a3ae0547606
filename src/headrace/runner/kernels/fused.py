"""Owns attention over block tables in one kernel, and the writing of new positions.

One pass over the cache for up to 128 queries: softmax is kept as a running maximum and sum. Few
queries read keys and values where they lie; for many these are packed first, span by span.
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
    LONGEST,
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
from headrace.runner.kernels.inplace import mix, score
from headrace.runner.kernels.numeric import (
    FAST,
    f32_at,
    fast_exp,
    largest,
    narrow,
    take_next,
    widen,
)
from headrace.runner.kernels.panels import can_pack, mix_packed, score_packed
from headrace.runner.kernels.pool import Kernel
from headrace.runner.kernels.tiles import PANEL, STEP, in_order, place

LOWEST = np.float32(-1e30)  # below every score, and far from overflow
_SPAN = 256  # positions whose scores are weighed together
_MANY = 32  # queries of a head from which on it pays to lay the past out as panels
_MOST = 128  # queries at once: with their scores they stay in the second cache


@njit(fastmath=FAST)
def _weigh(scores: Any, visible: Any, acc: Any, running: Any) -> None:
    """Scores become weights against the largest so far, hidden ones 0; acc and sum shrink along.

    Only loops from 0 to the size of a contiguous array become vectors, ten times as fast.
    """
    low, high = visible
    if low >= high:
        scores[:] = 0
        return
    _fill(scores[:low], LOWEST)
    _fill(scores[high:], LOWEST)
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


@njit
def _fill(row: Any, value: Any) -> None:
    for j in range(row.size):
        row[j] = value


@njit
def _take(q: Any, memory: Any, table: Any, span: Any, state: Any, sight: Any) -> None:
    """Adds positions [span) of one kv head's past: all their scores first, then all values.

    `sight`: the first query's position, the heads per query, and how far back each one sees.
    """
    (first, stop), (scores, acc, running, panels) = span, state
    position, group, window = sight
    size = memory[0].shape[2]
    blocks = range(first // size, (stop + size - 1) // size)
    base = blocks.start * size
    here = scores[:, : stop - base]
    if panels.size:
        score_packed(q, memory, table, blocks, panels, here)
    else:
        score(q, memory, table, blocks, scores)
    for g in range(running.shape[0]):
        own = position + g // group
        low, high = max(first, first_visible(own, window)), min(stop, own + 1)
        # a row of `scores`, not of `here`, of which the compiler cannot tell that it is contiguous
        _weigh(scores[g, : stop - base], (low - base, high - base), acc[g], running[g])
    if panels.size:
        mix_packed(here, memory, table, blocks, panels, acc)
    else:
        mix(scores, memory, table, blocks, (first, stop), acc)


@njit(fastmath=FAST)
def _attend(q: Any, memory: Any, table: Any, sight: Any, tops: Any, out: Any) -> None:
    """Queries [queries * heads of one kv head, dim] over their sequence's blocks, to `out`.

    `memory`: keys and values [num_blocks, kv_heads, block_size, dim], and which kv head. `tops`
    holds the heads' sinks, scores without a value, or is empty. out [queries, heads * dim].
    """
    position, group, window = sight
    num_rows, width = out.shape[0] * group, _SPAN + 2 * memory[0].shape[2]
    acc = np.zeros(q.shape, np.float32)
    scores = np.zeros((q.shape[0], (width + PANEL - 1) // PANEL * PANEL), np.float32)
    is_packed = _is_packed(num_rows, memory[0])
    panels = np.empty(scores.shape[1] * q.shape[1] if is_packed else 0, np.uint16)
    running = np.zeros((num_rows, 2), np.float32)
    for g in range(num_rows):
        running[g, 0] = tops[g % group] if tops.size else LOWEST
        running[g, 1] = np.float32(1) if tops.size else np.float32(0)
    first, stop = first_visible(position, window), position + out.shape[0]
    while first < stop:
        end = min(stop, (first // _SPAN + 1) * _SPAN)
        _take(q, memory, table, (first, end), (scores, acc, running, panels), sight)
        first = end
    dim, is_paired = q.shape[1], _is_paired(num_rows, memory[0])
    for g in range(num_rows):
        inverse = np.float32(1) / running[g, 1]
        row = out[g // group, g % group * dim : (g % group + 1) * dim]
        for i in range(dim):
            value = acc[g, place(i) if is_paired else i]
            row[i] = narrow(value * inverse, row[0])


@njit
def _is_packed(num_rows: int, keys: Any) -> bool:
    return num_rows >= _MANY and can_pack(keys)


@njit
def _is_paired(num_rows: int, keys: Any) -> bool:
    """Whether queries and sums lie in the order of the tiles: even and odd numbers apart."""
    return keys.itemsize == 2 and keys.shape[3] % STEP == 0 and not _is_packed(num_rows, keys)


@njit(fastmath=FAST)
def _scaled(rows: Any, group: int, keys: Any) -> Any:
    """One kv head's queries as float32 [queries * group, dim], the scale of the scores in them.

    Followed by empty ones, if keys are packed, to the end of the last tile.
    """
    dim, num_rows = keys.shape[3], rows.shape[0] * group
    scale = np.float32(1) / np.sqrt(np.float32(dim))
    left_over = -num_rows % 4 if _is_packed(num_rows, keys) else 0
    q = np.zeros((num_rows + left_over, dim), np.float32)
    for g in range(num_rows):
        row = rows[g // group, g % group * dim : (g % group + 1) * dim]
        for i in range(dim):
            q[g, i] = widen(row[i]) * scale
    return in_order(q, True) if _is_paired(num_rows, keys) else q


@njit
def _write(row: Any, new: Any) -> None:
    for i in range(row.size):
        row[i] = new[i]


@njit
def _find(piece: int, at: Any, lengths: Any, places: Any) -> Any:
    """Which chunk a piece of work belongs to: its number, its first piece, and how many tiles.

    `at` is the answer for an earlier piece. `places`: kv heads, tokens of a tile and of the longest
    chunk; longer ones have no pieces. A number that no chunk has: there is no such piece.
    """
    number, first, tiles = at
    kv_heads, at_once, longest = places
    while number < lengths.size and piece >= first + tiles * kv_heads:
        first += tiles * kv_heads
        number += 1
        tiles = 0
        if number < lengths.size and lengths[number] <= longest:
            tiles = (lengths[number] + at_once - 1) // at_once
    return number, first, tiles


@njit
def _write_all(g: Any, a: Any, new: Any, memory: Any, chunks: Any) -> None:
    """A piece of work is one kv head of one chunk: its positions are written to their blocks."""
    _, k, v, _ = new
    keys, values = memory
    starts, lengths, first_rows, table = chunks
    size, dim, places = g[BLOCK_SIZE], g[DIM], (g[KV_HEADS], g[LONGEST], g[LONGEST])
    at = (-1, 0, 0)
    while True:
        piece: int = take_next(a)
        at = _find(piece, at, lengths, places)
        chunk, kv = at[0], piece - at[1]
        if chunk == lengths.size:
            break
        for i in range(lengths[chunk]):
            position, row = starts[chunk] + i, first_rows[chunk] + i
            block, offset = table[chunk, position // size], position % size
            _write(keys[block, kv, offset], k[row, kv * dim : (kv + 1) * dim])
            _write(values[block, kv, offset], v[row, kv * dim : (kv + 1) * dim])


@njit
def _attend_all(g: Any, a: Any, new: Any, memory: Any, chunks: Any) -> None:
    """A piece of work is one kv head of up to _MOST queries of one chunk."""
    q, out = new[0], new[3]
    starts, lengths, first_rows, table = chunks
    dim, group = g[DIM], g[GROUP]
    sinks = carray(f32_at(g[SINKS]), g[NUM_SINKS])
    at_once = max(1, _MOST // group)
    at, places = (-1, 0, 0), (g[KV_HEADS], at_once, g[LONGEST])
    while True:
        piece: int = take_next(a)
        at = _find(piece, at, lengths, places)
        chunk, first, tiles = at
        if chunk == lengths.size:
            break
        kv, token = (piece - first) // tiles, (piece - first) % tiles * at_once
        row, stop = first_rows[chunk] + token, min(token + at_once, lengths[chunk])
        rows = slice(row, row + stop - token)
        heads = slice(kv * group * dim, (kv + 1) * group * dim)
        _attend(
            _scaled(q[rows, heads], group, memory[0]),
            (memory[0], memory[1], kv),
            table[chunk],
            (starts[chunk] + token, group, g[WINDOW]),
            sinks[kv * group : (kv + 1) * group] if sinks.size else sinks,
            out[rows, heads],
        )


@Kernel
def _write_bf16(a: Any) -> None:
    g = carray(a, FRAME_SIZE)
    _write_all(g, a, new_bf16(g), memory_bf16(g), chunks_of(g))


@Kernel
def _write_float(a: Any) -> None:
    g = carray(a, FRAME_SIZE)
    _write_all(g, a, new_float(g), memory_float(g), chunks_of(g))


@Kernel
def _attend_bf16(a: Any) -> None:
    g = carray(a, FRAME_SIZE)
    _attend_all(g, a, new_bf16(g), memory_bf16(g), chunks_of(g))


@Kernel
def _attend_float(a: Any) -> None:
    g = carray(a, FRAME_SIZE)
    _attend_all(g, a, new_float(g), memory_float(g), chunks_of(g))


WRITE_AND_ATTEND = {
    torch.bfloat16: (_write_bf16, _attend_bf16),
    torch.float32: (_write_float, _attend_float),
}
"""By the cache's dtype, to be run in this order; the frame is that of frame.py."""
