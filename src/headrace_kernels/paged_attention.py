"""Owns attention over block tables in one kernel, and the writing of new keys and values.

One pass over the cache for up to 128 queries: softmax is kept as a running maximum and sum.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit
from numba.np.numpy_support import carray
from torch import Tensor

from headrace_kernels.amx import DEEP, TILE, configure, release
from headrace_kernels.arguments import (
    BLOCK_SIZE,
    CAP,
    DIM,
    GROUP,
    KV_HEADS,
    NUM_SINKS,
    NUM_TOKENS,
    SINKS,
    SIZE,
    WINDOW,
    chunks_of,
    first_visible,
    memory_bf16,
    memory_float,
    memory_words,
    new_bf16,
    new_float,
)
from headrace_kernels.blocks import (
    WIDEST,
    Past,
    fits_vectors,
    mix,
    padded,
    per_word,
    score,
    write_numbers,
    write_pairs,
)
from headrace_kernels.blocks_amx import (
    fits_amx,
    mix_amx,
    padded_amx,
    score_amx,
)
from headrace_kernels.instruction_sets import InstructionSet
from headrace_kernels.launch import Kernel
from headrace_kernels.numeric import (
    FAST,
    compiled_as,
    f32_at,
    fast_exp,
    narrow,
    take_next,
    widen,
)
from headrace_kernels.softmax import LOG2_E, LOWEST, highest, shrink_row, soften_row, weigh
from headrace_kernels.tiles import LANES, empty_rows

_SPAN = 256  # positions whose scores are weighed together
_MOST = 128  # queries at once: with their scores they stay in the second cache


class _Queries(NamedTuple):
    """Rows of q that share one kv head of one sequence."""

    token: int  # the first
    num_tokens: int
    column: int  # where the heads begin


class _Sight(NamedTuple):
    """The positions that those queries see, and the scale of their scores."""

    position: int  # of the first
    group: int  # query heads per kv head
    window: int  # how far back; 0: all
    dim: int
    scale: Any  # of scores, for powers of two
    cap: Any  # of scores before they are scaled; 0: none


@njit(inline="always")
def _visible(g: int, span: Any, sight: Any) -> Any:
    """The columns that row g sees, from and to, and the number of vectors."""
    first, stop, base = span
    own = sight.position + g // sight.group
    low, high = max(first, first_visible(own, sight.window)), min(stop, own + 1)
    return low - base, high - base, (stop - base + DEEP - 1) // DEEP * DEEP // LANES


class _Working(NamedTuple):
    """The arrays of a piece of work: some are filled anew for each span, some add up."""

    scores: Any  # float32 [rows, positions of a span and some more]
    weights: Any  # of those positions: the same array, or bfloat16 bits
    values: Any  # float32 [rows, dim and a vector more]: weighed, so far
    running: Any  # float32 [queries, 2]: the largest scaled score so far, the sum of weights
    tops: Any  # float32 [queries]: the largest scaled score with this span
    room: Any  # int64 arrays, as `blocks.score` takes them


@njit(fastmath=FAST)
def _weigh(sums: Any, span: Any, sight: Any) -> None:
    """Weights of scores against the largest so far; weighed values and sums shrink along.

    span: first position, stop, and where column 0 lies. Powers of two instead of e, by `scale`. All
    largest scores come first: rows of which each waits for its own take twice as long.
    """
    scores, weights, values, running, tops, _ = sums
    scale = sight.scale
    if sight.cap:
        for g in range(tops.size):
            soften_row(scores, g, _visible(g, span, sight)[2], sight.cap)
    for g in range(tops.size):
        tops[g] = max(highest(scores, g, _visible(g, span, sight)) * scale, running[g, 0])
    for g in range(tops.size):
        visible, before, top = _visible(g, span, sight), running[g, 0], tops[g]
        if visible[0] >= visible[1]:
            weights[g, : visible[2] * LANES] = 0
            continue
        total = weigh(scores, g, visible, (scale, top), weights)
        if top > before:
            shrink = fast_exp((before - top) * np.float32(1 / LOG2_E))
            shrink_row(values, g, values.shape[1] // LANES, shrink)
            running[g, 0] = top
            running[g, 1] *= shrink
        running[g, 1] += total


@njit
def _begun(num_rows: int, sinks: Any, group: int) -> Any:
    """The largest scores and sums of queries that have seen nothing but their heads' sinks."""
    running = np.zeros((num_rows, 2), np.float32)
    running[:, 0] = LOWEST
    if sinks.size:
        for g in range(num_rows):
            running[g, 0], running[g, 1] = sinks[g % group] * np.float32(LOG2_E), 1
    return running


@njit(fastmath=FAST)
def _put(sums: Any, where: Any, sight: Any, out: Any) -> None:
    """Weighed values by the sums of their weights, to the queries' places in `out`."""
    group, dim, values, running = sight.group, sight.dim, sums.values, sums.running
    for g in range(running.shape[0]):
        # without a score that is a number there is no sum, and the error of a division by
        # it would keep the rows after it from being computed
        has_scores = running[g, 0] > np.float32(LOWEST / 2) * sight.scale
        inverse = np.float32(1) / running[g, 1] if has_scores else np.float32(np.nan)
        begin = where.column + g % group * dim
        row, total = out[where.token + g // group, begin : begin + dim], values[g]
        for i in range(row.size):
            row[i] = narrow(total[i] * inverse, row[0])


def _attention(name: str, score: Any, mix: Any, new_rows: Any, new_weights: Any) -> Any:
    """score, mix: products with keys and with values; new_rows: queries as `score` takes them."""

    @compiled_as(name)
    def take(q: Any, past: Any, span: Any, sums: Any, sight: Any) -> None:
        """Adds positions [span) of one kv head's past: all their scores first, then all values."""
        (first, stop), dim = span, q.shape[1]
        size = past.keys.shape[2] // dim
        blocks = range(first // size, (stop + size - 1) // size)
        base = blocks.start * size
        score(q, past, blocks, sums.room, sums.scores)
        _weigh(sums, (first, stop, base), sight)
        mix(sums.weights, past, blocks, stop - base, sums.room, sums.values[:, :dim])

    @compiled_as(name)
    def attend(q: Any, out: Any, where: Any, past: Any, sight: Any, sinks: Any) -> None:
        """Some queries of q [tokens, numbers] over their sequence's blocks, to the same of `out`.

        `sinks` of the heads are scores without a value, or empty.
        """
        dim, num_rows = sight.dim, where.num_tokens * sight.group
        rows, size = new_rows(q, where, sight.group, dim), past.keys.shape[2] // dim
        width = _SPAN + 2 * size + DEEP
        scores = empty_rows(rows.shape[0], width, np.float32)
        values = empty_rows(rows.shape[0], dim + LANES, np.float32)
        values[:] = 0
        room = np.empty(width + dim, np.int64), np.empty(width // LANES + dim + WIDEST, np.int64)
        running, tops = _begun(num_rows, sinks, sight.group), np.empty(num_rows, np.float32)
        sums = _Working(scores, new_weights(scores, num_rows), values, running, tops, room)
        first = first_visible(sight.position, sight.window)
        stop = sight.position + where.num_tokens
        while first < stop:
            end = min(stop, (first // _SPAN + 1) * _SPAN)
            take(rows, past, (first, end), sums, sight)
            first = end
        _put(sums, where, sight, out)

    return attend


@njit
def _fill_rows(q: Any, where: Any, group: int, rows: Any) -> Any:
    """One kv head's queries to rows [queries * group, dim], float32 or as they are.

    Followed by zeros to the end of the last tile: what lay there before might be tiny numbers, with
    which processors are slow.
    """
    token, num_tokens, column = where
    num_rows, dim = num_tokens * group, rows.shape[1]
    rows[num_rows:] = 0
    for g in range(num_rows):
        begin = column + g % group * dim
        source, target = q[token + g // group, begin : begin + dim], rows[g]
        for i in range(target.size):
            target[i] = narrow(widen(source[i]), target[0])
    return rows


@njit
def _wide_rows(q: Any, where: Any, group: int, dim: int) -> Any:
    rows = empty_rows(padded(where.num_tokens * group), dim, np.float32)
    return _fill_rows(q, where, group, rows)


@njit
def _rows_bf16(q: Any, where: Any, group: int, dim: int) -> Any:
    rows = empty_rows(padded(where.num_tokens * group), dim, np.uint16)
    return _fill_rows(q, where, group, rows)


@njit
def _same(scores: Any, num_rows: int) -> Any:
    return scores


@njit
def _rows_amx(q: Any, where: Any, group: int, dim: int) -> Any:
    """The rows as they are, with AMX configured for them."""
    num_rows = padded_amx(where.num_tokens * group)
    configure(np.zeros(64, np.uint8), min(num_rows, TILE), TILE)
    return _fill_rows(q, where, group, empty_rows(num_rows, dim, np.uint16))


@njit
def _weights_bf16(scores: Any, num_rows: int) -> Any:
    weights = empty_rows(scores.shape[0], scores.shape[1], np.uint16)
    weights[num_rows:] = 0
    return weights


_attend = _attention("numbers", score, mix, _wide_rows, _same)
_attend_dot = _attention("dot", score, mix, _rows_bf16, _weights_bf16)
_attend_amx = _attention("amx", score_amx, mix_amx, _rows_amx, _weights_bf16)


@njit
def _find(piece: int, at: Any, lengths: Any, places: Any) -> Any:
    """The chunk that a piece of work belongs to: its number, first piece and number of tiles.

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


def _writer(name: str, write: Any) -> Any:
    @compiled_as(name)
    def write_all(g: Any, a: Any, new: Any, memory: Any) -> None:
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

    return write_all


_write_pairs, _write_numbers = _writer("pairs", write_pairs), _writer("numbers", write_numbers)


def _attend_by(name: str, attend: Any) -> Any:
    @compiled_as(name)
    def attend_all(g: Any, a: Any, new: Any, memory: Any) -> None:
        """A piece of work is one kv head of up to _MOST queries of one chunk."""
        q, out = new[0], new[3]
        starts, lengths, first_rows, table = chunks_of(g)
        dim, group = g[DIM], g[GROUP]
        sinks = carray(f32_at(g[SINKS]), g[NUM_SINKS])
        root = np.sqrt(np.float32(dim))
        scale, cap = np.float32(LOG2_E) / root, np.float32(g[CAP] * 1e-6) * root
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
            attend(
                q,
                out,
                _Queries(row, stop - token, kv * group * dim),
                Past(memory[0], memory[1], table[chunk], kv),
                _Sight(starts[chunk] + token, group, g[WINDOW], dim, scale, cap),
                sinks[kv * group : (kv + 1) * group] if sinks.size else sinks,
            )

    return attend_all


_attend_all = _attend_by("numbers", _attend)
_attend_all_dot = _attend_by("dot", _attend_dot)
_attend_all_amx = _attend_by("amx", _attend_amx)


@Kernel
def _write_bf16(a: Any) -> None:
    g = carray(a, SIZE)
    if per_word(memory_bf16(g)[0], g[DIM]) == 2:
        _write_pairs(g, a, new_bf16(g), memory_words(g))
    else:
        _write_numbers(g, a, new_bf16(g), memory_bf16(g))


@Kernel
def _write_float(a: Any) -> None:
    g = carray(a, SIZE)
    _write_numbers(g, a, new_float(g), memory_float(g))


@Kernel
def _attend_bf16(a: Any) -> None:
    g = carray(a, SIZE)
    _attend_all(g, a, new_bf16(g), memory_bf16(g))


@Kernel
def _attend_bf16_dot(a: Any) -> None:
    g = carray(a, SIZE)
    _attend_all_dot(g, a, new_bf16(g), memory_bf16(g))


@Kernel
def _attend_bf16_amx(a: Any) -> None:
    g = carray(a, SIZE)
    _attend_all_amx(g, a, new_bf16(g), memory_bf16(g))
    release()


@Kernel
def _attend_float(a: Any) -> None:
    g = carray(a, SIZE)
    _attend_all(g, a, new_float(g), memory_float(g))


def kernels_for(
    keys: Tensor, values: Tensor, instructions: InstructionSet
) -> tuple[Kernel, Kernel]:
    """The kernels that write to and attend over a cache [blocks, kv_heads, block_size, dim]."""
    if keys.shape != values.shape:
        raise ValueError(
            f"The kernels take keys and values of one size, not {keys.shape[3]} and "
            f"{values.shape[3]} numbers; fill up the shorter with zeros."
        )
    if keys.dtype == torch.float32:
        return _write_float, _attend_float
    size, dim = keys.shape[2:]
    if instructions == "amx" and fits_amx(size, dim):
        return _write_bf16, _attend_bf16_amx
    # not compiled: as code for Python it would be anew in every process
    if instructions == "bf16dot" and fits_vectors.py_func(size, dim):
        return _write_bf16, _attend_bf16_dot
    return _write_bf16, _attend_bf16
