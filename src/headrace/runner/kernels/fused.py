"""Owns attention over block tables in one kernel, and the writing of new positions.

One pass over the cache for up to 128 queries: softmax is kept as a running maximum and sum.
"""

from typing import Any

import numpy as np
import torch
from numba import njit
from numba.np.numpy_support import carray
from torch import Tensor

from headrace.runner.kernels.blocks import (
    WIDEST,
    mix,
    padded,
    per_word,
    score,
    write_numbers,
    write_pairs,
)
from headrace.runner.kernels.blocks_by_unit import (
    fits_unit,
    mix_by_unit,
    padded_for_unit,
    score_by_unit,
)
from headrace.runner.kernels.frame import (
    BLOCK_SIZE,
    DIM,
    FRAME_SIZE,
    GROUP,
    KV_HEADS,
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
from headrace.runner.kernels.matrix import DEEP, TILE, configure, has_matrix_unit, release
from headrace.runner.kernels.numeric import (
    FAST,
    f32_at,
    fast_exp,
    narrow,
    take_next,
    widen,
)
from headrace.runner.kernels.pool import Kernel
from headrace.runner.kernels.softmax import LOWEST, highest, shrink_row, weigh
from headrace.runner.kernels.tiles import LANES

_SPAN = 256  # positions whose scores are weighed together
_MOST = 128  # queries at once: with their scores they stay in the second cache


@njit(fastmath=FAST)
def _weigh(g: int, visible: Any, scale: Any, state: Any) -> None:
    """Weights of row g's scores against the largest so far; weighed values and sum shrink along.

    visible: which scores are, from and to, and how many vectors there are; others weigh 0. Rows are
    numbers here: a slice is counted by the threads together, which takes longer than its softmax.
    """
    scores, weights, acc, running = state
    if visible[0] >= visible[1]:
        weights[g, : visible[2] * LANES] = 0
        return
    before = running[g, 0]
    top = max(highest(scores, g, visible) * scale, before)
    total = weigh(scores, g, visible, (scale, top), weights)
    if top > before:
        shrink = fast_exp(before - top)
        shrink_row(acc, g, acc.shape[1] // LANES, shrink)
        running[g, 0] = top
        running[g, 1] *= shrink
    running[g, 1] += total


def _attention(score: Any, mix: Any, new_rows: Any, new_weights: Any) -> Any:
    """score, mix: products with keys and with values; new_rows: queries as `score` takes them."""

    @njit
    def take(q: Any, past: Any, span: Any, state: Any, sight: Any) -> None:
        """Adds positions [span) of one kv head's past: all their scores first, then all values.

        `sight`: the first query's position, the heads per query, and how far back each one sees.
        """
        (first, stop), (scores, weights, acc, running, room) = span, state
        position, group, window = sight
        dim = q.shape[1]
        size, scale = past[0].shape[2] // dim, np.float32(1) / np.sqrt(np.float32(dim))
        blocks = range(first // size, (stop + size - 1) // size)
        base = blocks.start * size
        count = stop - base
        score(q, past, blocks, room, scores)
        for g in range(running.shape[0]):
            own = position + g // group
            low, high = max(first, first_visible(own, window)), min(stop, own + 1)
            visible = low - base, high - base, (count + DEEP - 1) // DEEP * DEEP // LANES
            _weigh(g, visible, scale, (scores, weights, acc, running))
        mix(weights, past, blocks, count, room, acc[:, :dim])

    @njit(fastmath=FAST)
    def attend(rows: Any, past: Any, sight: Any, tops: Any, out: Any) -> None:
        """Queries over their sequence's blocks, to out [queries, heads of one kv head * dim].

        `rows` are like `out`. `past`: keys and values [blocks, kv_heads, numbers of a block], the
        sequence's block table, and which kv head. `tops` holds the heads' sinks, scores without a
        value, or is empty.
        """
        position, group, window = sight
        num_rows, dim = out.shape[0] * group, out.shape[1] // group
        q, size = new_rows(rows, group, dim), past[0].shape[2] // dim
        width = _SPAN + 2 * size + DEEP
        acc = np.zeros((q.shape[0], dim + LANES), np.float32)
        scores = np.empty((q.shape[0], width), np.float32)
        room = np.empty(width + dim, np.int64), np.empty(width // LANES + dim + WIDEST, np.int64)
        running = np.zeros((num_rows, 2), np.float32)
        for g in range(num_rows):
            running[g, 0] = tops[g % group] if tops.size else np.float32(LOWEST)
            running[g, 1] = np.float32(1) if tops.size else np.float32(0)
        state = scores, new_weights(scores), acc, running, room
        first, stop = first_visible(position, window), position + out.shape[0]
        while first < stop:
            end = min(stop, (first // _SPAN + 1) * _SPAN)
            take(q, past, (first, end), state, sight)
            first = end
        for g in range(num_rows):
            inverse = np.float32(1) / running[g, 1]
            row, total = out[g // group, g % group * dim : (g % group + 1) * dim], acc[g]
            for i in range(row.size):
                row[i] = narrow(total[i] * inverse, row[0])

    return attend


@njit
def _wide_rows(rows: Any, group: int, dim: int) -> Any:
    """One kv head's queries as float32 [queries * group, dim].

    Followed by zeros to the end of the last tile: what lay there before might be tiny numbers, with
    which processors are slow.
    """
    num_rows = rows.shape[0] * group
    q = np.empty((padded(num_rows), dim), np.float32)
    q[num_rows:] = 0
    for g in range(num_rows):
        row, target = rows[g // group, g % group * dim : (g % group + 1) * dim], q[g]
        for i in range(target.size):
            target[i] = widen(row[i])
    return q


@njit
def _same(scores: Any) -> Any:
    return scores


@njit
def _rows_for_unit(rows: Any, group: int, dim: int) -> Any:
    """The same as they are, with the unit configured for them."""
    num_rows = rows.shape[0] * group
    q = np.zeros((padded_for_unit(num_rows), dim), np.uint16)
    for g in range(num_rows):
        q[g] = rows[g // group, g % group * dim : (g % group + 1) * dim]
    configure(np.zeros(64, np.uint8), min(q.shape[0], TILE), TILE)
    return q


@njit
def _weights_for_unit(scores: Any) -> Any:
    return np.zeros(scores.shape, np.uint16)


_attend = _attention(score, mix, _wide_rows, _same)
_attend_by_unit = _attention(score_by_unit, mix_by_unit, _rows_for_unit, _weights_for_unit)


@njit
def _find(piece: int, at: Any, lengths: Any, places: Any) -> Any:
    """Which chunk a piece of work belongs to: its number, its first piece, and how many tiles.

    `at` is the answer for an earlier piece. `places`: kv heads and tokens of a tile. A number that
    no chunk has: there is no such piece.
    """
    number, first, tiles = at
    kv_heads, at_once = places
    while number < lengths.size and piece >= first + tiles * kv_heads:
        first += tiles * kv_heads
        number += 1
        tiles = 0
        if number < lengths.size:
            tiles = (lengths[number] + at_once - 1) // at_once
    return number, first, tiles


def _writer(write: Any) -> Any:
    @njit
    def run(g: Any, a: Any, new: Any, memory: Any) -> None:
        """A piece of work is one kv head of one chunk: its positions, to their blocks."""
        _, k, v, _ = new
        keys, values = memory
        starts, lengths, first_rows, table = chunks_of(g)
        size, dim, places = g[BLOCK_SIZE], g[DIM], (g[KV_HEADS], g[NUM_TOKENS])
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


def _attend_by(attend: Any) -> Any:
    @njit
    def run(g: Any, a: Any, new: Any, memory: Any) -> None:
        """A piece of work is one kv head of up to _MOST queries of one chunk."""
        q, out = new[0], new[3]
        starts, lengths, first_rows, table = chunks_of(g)
        dim, group = g[DIM], g[GROUP]
        sinks = carray(f32_at(g[SINKS]), g[NUM_SINKS])
        at_once = max(1, _MOST // group)
        at, places = (-1, 0, 0), (g[KV_HEADS], at_once)
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
            attend(
                q[rows, heads],
                (memory[0], memory[1], table[chunk], kv),
                (starts[chunk] + token, group, g[WINDOW]),
                sinks[kv * group : (kv + 1) * group] if sinks.size else sinks,
                out[rows, heads],
            )

    return run


_attend_all, _attend_all_by_unit = _attend_by(_attend), _attend_by(_attend_by_unit)


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
    _attend_all(g, a, new_bf16(g), memory_bf16(g))


@Kernel
def _attend_by_matrix_unit(a: Any) -> None:
    g = carray(a, FRAME_SIZE)
    _attend_all_by_unit(g, a, new_bf16(g), memory_bf16(g))
    release()


@Kernel
def _attend_float(a: Any) -> None:
    g = carray(a, FRAME_SIZE)
    _attend_all(g, a, new_float(g), memory_float(g))


def kernels_for(keys: Tensor) -> tuple[Kernel, Kernel]:
    """What writes and what attends for a cache [blocks, kv_heads, block_size, dim]; the frame of
    both is that of frame.py."""
    if keys.dtype == torch.float32:
        return _write_float, _attend_float
    by_unit = fits_unit(keys.shape[2], keys.shape[3]) and has_matrix_unit()
    return _write_bf16, _attend_by_matrix_unit if by_unit else _attend_bf16
