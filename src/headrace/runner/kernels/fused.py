"""Owns attention over block tables in one kernel, and the writing of new positions.

One pass over the cache for up to 128 queries: softmax is kept as a running maximum and sum.
"""

from typing import Any

import numpy as np
import torch
from numba import njit
from numba.np.numpy_support import carray

from headrace.runner.kernels.blocks import (
    WIDEST,
    mix,
    padded,
    per_word,
    score,
    write_numbers,
    write_pairs,
)
from headrace.runner.kernels.frame import (
    BLOCK_SIZE,
    DIM,
    FRAME_SIZE,
    GROUP,
    KV_HEADS,
    LONGEST,
    NUM_SINKS,
    NUM_TOKENS,
    SINKS,
    WINDOW,
    chunks_of,
    first_visible,
    memory_bf16,
    memory_float,
    memory_words,
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
from headrace.runner.kernels.tiles import LANES

LOWEST = np.float32(-1e30)  # below every score, and far from overflow
_SPAN = 256  # positions whose scores are weighed together
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
def _take(q: Any, past: Any, span: Any, state: Any, sight: Any) -> None:
    """Adds positions [span) of one kv head's past: all their scores first, then all values.

    `sight`: the first query's position, the heads per query, and how far back each one sees.
    """
    (first, stop), (scores, acc, running, room) = span, state
    position, group, window = sight
    size = past[0].shape[2] // q.shape[1]
    blocks = range(first // size, (stop + size - 1) // size)
    base = blocks.start * size
    count = stop - base
    score(q, past, blocks, room, scores)
    for g in range(running.shape[0]):
        own = position + g // group
        low, high = max(first, first_visible(own, window)), min(stop, own + 1)
        _weigh(scores[g, :count], (low - base, high - base), acc[g], running[g])
        scores[g, count] = 0
    mix(scores, past, blocks, count, room, acc[:, : q.shape[1]])


@njit(fastmath=FAST)
def _attend(q: Any, past: Any, sight: Any, tops: Any, out: Any) -> None:
    """Queries [queries * heads of one kv head, dim] over their sequence's blocks, to `out`.

    `past`: keys and values [blocks, kv_heads, numbers of a block], the sequence's block table, and
    which kv head. `tops` holds the heads' sinks, scores without a value, or is empty. out [queries,
    heads * dim].
    """
    position, group, window = sight
    num_rows, dim, size = out.shape[0] * group, q.shape[1], past[0].shape[2] // q.shape[1]
    width = _SPAN + 2 * size + LANES
    acc = np.zeros((q.shape[0], dim + LANES), np.float32)
    scores = np.empty((q.shape[0], width), np.float32)
    room = np.empty(width + dim, np.int64), np.empty(width // LANES + dim + WIDEST, np.int64)
    running = np.zeros((num_rows, 2), np.float32)
    for g in range(num_rows):
        running[g, 0] = tops[g % group] if tops.size else LOWEST
        running[g, 1] = np.float32(1) if tops.size else np.float32(0)
    first, stop = first_visible(position, window), position + out.shape[0]
    while first < stop:
        end = min(stop, (first // _SPAN + 1) * _SPAN)
        _take(q, past, (first, end), (scores, acc, running, room), sight)
        first = end
    for g in range(num_rows):
        inverse = np.float32(1) / running[g, 1]
        row, total = out[g // group, g % group * dim : (g % group + 1) * dim], acc[g]
        for i in range(row.size):
            row[i] = narrow(total[i] * inverse, row[0])


@njit(fastmath=FAST)
def _scaled(rows: Any, group: int, dim: int) -> Any:
    """One kv head's queries as float32 [queries * group, dim], the scale of the scores in them.

    Followed by zeros to the end of the last tile: what lay there before might be tiny numbers, with
    which processors are slow.
    """
    num_rows = rows.shape[0] * group
    scale = np.float32(1) / np.sqrt(np.float32(dim))
    q = np.empty((padded(num_rows), dim), np.float32)
    q[num_rows:] = 0
    for g in range(num_rows):
        row, target = rows[g // group, g % group * dim : (g % group + 1) * dim], q[g]
        for i in range(target.size):
            target[i] = widen(row[i]) * scale
    return q


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


def _writer(write: Any) -> Any:
    @njit
    def run(g: Any, a: Any, new: Any, memory: Any) -> None:
        """A piece of work is one kv head of one chunk: its positions, to their blocks."""
        _, k, v, _ = new
        keys, values = memory
        starts, lengths, first_rows, table = chunks_of(g)
        size, dim, places = g[BLOCK_SIZE], g[DIM], (g[KV_HEADS], g[NUM_TOKENS], g[NUM_TOKENS])
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
                span = slice(kv * dim, (kv + 1) * dim)
                write(keys[block, kv], values[block, kv], offset, k[row, span], v[row, span])

    return run


_write_pairs, _write_numbers = _writer(write_pairs), _writer(write_numbers)


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
            _scaled(q[rows, heads], group, dim),
            (memory[0], memory[1], table[chunk], kv),
            (starts[chunk] + token, group, g[WINDOW]),
            sinks[kv * group : (kv + 1) * group] if sinks.size else sinks,
            out[rows, heads],
        )


@Kernel
def _write_bf16(a: Any) -> None:
    g = carray(a, FRAME_SIZE)
    if per_word(memory_bf16(g)[0], g[DIM]) == 2:
        _write_pairs(g, a, new_bf16(g), memory_words(g))
    else:
        _write_numbers(g, a, new_bf16(g), memory_bf16(g))


@Kernel
def _write_float(a: Any) -> None:
    g = carray(a, FRAME_SIZE)
    _write_numbers(g, a, new_float(g), memory_float(g))


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
