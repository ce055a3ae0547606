"""Computes attention over block tables in one kernel, and writes new keys and values to the cache.

A piece of work is one kv head for up to 128 queries. As in FlashAttention, a piece reads the
cache once, in spans of 256 positions. For each span, the piece computes all scores. Then it
updates three numbers of each query: the largest score, the sum of weights and the weighted sum of
values. If a span raises the largest score, the two sums are first scaled down to the new largest
score. At the end, each weighted sum is divided by the sum of weights.

Spans begin at fixed multiples of 256 positions, however a prompt was cut into chunks.
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
    memory_bytes,
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
    positions_of,
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
from headrace_kernels.blocks_int8 import mix_bytes, score_bytes, write_bytes
from headrace_kernels.instruction_sets import InstructionSet
from headrace_kernels.launch import Kernel, kernel_named
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

_SPAN = 256  # number of positions in a span
# The maximum number of queries in a piece of work. The queries and their scores fit into the L2
# cache.
_MAX_QUERIES = 128


class _Queries(NamedTuple):
    """Rows of q that share one kv head of one sequence."""

    token: int  # row of the first token
    num_tokens: int
    column: int  # first column in q of the kv head's query heads


class _Sight(NamedTuple):
    """The positions that some queries can see, and the scale of the scores."""

    position: int  # position of the first query
    group: int  # number of query heads for each kv head
    window: int  # number of positions; 0 means no window
    dim: int
    # The factor of scores. The factor includes log2(e), so that weights are powers of 2.
    scale: Any
    cap: Any  # limit of scores before scaling; 0 means no limit


@njit(inline="always")
def _visible(g: int, span: Any, sight: Any) -> Any:
    """Return the columns that row g sees as (first, end, vectors).

    first: the first visible column. end: the column after the last visible column. vectors: the
    number of vectors in the span.
    """
    first, stop, base = span
    own = sight.position + g // sight.group
    low, high = max(first, first_visible(own, sight.window)), min(stop, own + 1)
    return low - base, high - base, (stop - base + DEEP - 1) // DEEP * DEEP // LANES


class _Working(NamedTuple):
    """The arrays for a piece of work, which is one kv head for some queries.

    Each span overwrites `scores`, `weights` and `tops`, and adds to `values` and `running`.
    """

    scores: Any  # float32 [rows, positions of a span and some more]
    # [rows, positions of a span and some more]: the same array as scores, or bfloat16 bits.
    weights: Any
    values: Any  # float32 [rows, dim and a vector more], the weighted sums so far
    running: Any  # float32 [queries, 2], the largest scaled score and the sum of weights so far
    tops: Any  # float32 [queries], the largest scaled score including the current span
    room: Any  # int64 arrays for `blocks.score`


@njit(fastmath=FAST)
def _weigh(sums: Any, span: Any, sight: Any) -> None:
    """Turn a span's scores into weights relative to the largest score so far, and sum the weights.

    span: first position, stop, and the position of column 0. If a span has a new largest score,
    the earlier sums are scaled down. Weights are powers of two, because `scale` includes log2(e).
    The largest scores of all rows are computed before any weight. Otherwise each row would wait for
    its own largest score, and the loop would take twice as long.
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
def _initial_sums(num_rows: int, sinks: Any, group: int) -> Any:
    """Return the initial largest score and sum of weights of each query.

    With sinks, these are the score of the head's sink and 1. Without sinks, they are LOWEST and 0.
    """
    running = np.zeros((num_rows, 2), np.float32)
    running[:, 0] = LOWEST
    if sinks.size:
        for g in range(num_rows):
            running[g, 0], running[g, 1] = sinks[g % group] * np.float32(LOG2_E), 1
    return running


@njit(fastmath=FAST)
def _write_output(sums: Any, where: Any, sight: Any, out: Any) -> None:
    """Divide the weighted values by the sums of weights; write the results to the queries' rows."""
    group, dim, values, running = sight.group, sight.dim, sums.values, sums.running
    for g in range(running.shape[0]):
        # If no score is a number, the sum of weights is 0. A division by 0 would raise an error,
        # and the following rows would not be computed.
        has_scores = running[g, 0] > np.float32(LOWEST / 2) * sight.scale
        inverse = np.float32(1) / running[g, 1] if has_scores else np.float32(np.nan)
        begin = where.column + g % group * dim
        row, total = out[where.token + g // group, begin : begin + dim], values[g]
        for i in range(row.size):
            row[i] = narrow(total[i] * inverse, row[0])


def _attention(name: str, score: Any, mix: Any, new_rows: Any, new_weights: Any) -> Any:
    """Make a function `attend` from the products and formats of an instruction set.

    score, mix: products with keys and with values. new_rows: copies queries into the format that
    `score` takes. new_weights: makes the array of weights for an array of scores.
    """

    @compiled_as(name)
    def take(q: Any, past: Any, span: Any, sums: Any, sight: Any) -> None:
        """Add the positions of a span: compute all scores first, then add all values."""
        (first, stop), dim = span, q.shape[1]
        size = positions_of(past.keys, dim)
        blocks = range(first // size, (stop + size - 1) // size)
        base = blocks.start * size
        score(q, past, blocks, sums.room, sums.scores)
        _weigh(sums, (first, stop, base), sight)
        mix(sums.weights, past, blocks, stop - base, sums.room, sums.values[:, :dim])

    @compiled_as(name)
    def attend(q: Any, out: Any, where: Any, past: Any, sight: Any, sinks: Any) -> None:
        """Let some queries of q [tokens, numbers] attend to the blocks of their sequence.

        The results are written to the same rows and columns of `out`. sinks: the score of each
        head's sink, or an empty array.
        """
        dim, num_rows = sight.dim, where.num_tokens * sight.group
        rows, size = new_rows(q, where, sight.group, dim), positions_of(past.keys, dim)
        width = _SPAN + 2 * size + DEEP
        scores = empty_rows(rows.shape[0], width, np.float32)
        values = empty_rows(rows.shape[0], dim + LANES, np.float32)
        values[:] = 0
        room = np.empty(width + dim, np.int64), np.empty(width // LANES + dim + WIDEST, np.int64)
        running, tops = _initial_sums(num_rows, sinks, sight.group), np.empty(num_rows, np.float32)
        sums = _Working(scores, new_weights(scores, num_rows), values, running, tops, room)
        first = first_visible(sight.position, sight.window)
        stop = sight.position + where.num_tokens
        while first < stop:
            end = min(stop, (first // _SPAN + 1) * _SPAN)
            take(rows, past, (first, end), sums, sight)
            first = end
        _write_output(sums, where, sight, out)

    return attend


@njit
def _fill_rows(q: Any, where: Any, group: int, rows: Any) -> Any:
    """Copy the queries of one kv head to rows [queries * group, dim], as float32 or unchanged.

    The remaining rows up to the end of the last tile are set to 0. Stale memory could hold
    subnormal numbers, which slow processors down.
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
    """Copy the queries unchanged, and configure AMX for the number of copied rows."""
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
_attend_bytes = _attention("bytes", score_bytes, mix_bytes, _wide_rows, _same)
_attend_amx = _attention("amx", score_amx, mix_amx, _rows_amx, _weights_bf16)


@njit
def _find(piece: int, at: Any, lengths: Any, places: Any) -> Any:
    """Return the number, the first piece and the number of tiles of the chunk with piece `piece`.

    at: the result for an earlier piece, where the search starts. places: the number of kv heads
    and the number of tokens in a tile. If the piece does not exist, the returned number is the
    number of chunks.
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
        """Write the new keys and values to their blocks. A piece is one kv head of a chunk."""
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
_write_bytes = _writer("bytes", write_bytes)


@njit
def _nothing() -> None:
    pass


def _attend_kernel(
    name: str, attend: Any, new_of: Any, memory_of: Any, end: Any = _nothing
) -> Kernel:
    """Make the kernel for `attend`.

    new_of, memory_of: read the new rows and the cache from the kernel's arguments. end: called
    when no piece of work is left.
    """

    def attend_all(a: Any) -> None:
        """Take pieces until none is left: a kv head of up to _MAX_QUERIES queries of a chunk."""
        g = carray(a, SIZE)
        (q, _, _, out), memory = new_of(g), memory_of(g)
        starts, lengths, first_rows, table = chunks_of(g)
        dim, group = g[DIM], g[GROUP]
        sinks = carray(f32_at(g[SINKS]), g[NUM_SINKS])
        root = np.sqrt(np.float32(dim))
        scale, cap = np.float32(LOG2_E) / root, np.float32(g[CAP] * 1e-6) * root
        at_once = max(1, _MAX_QUERIES // group)
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
        end()

    return kernel_named(f"attend_{name}", attend_all)


_attend_bf16 = _attend_kernel("bf16", _attend, new_bf16, memory_bf16)
_attend_bf16_dot = _attend_kernel("bf16_dot", _attend_dot, new_bf16, memory_bf16)
_attend_bf16_amx = _attend_kernel("bf16_amx", _attend_amx, new_bf16, memory_bf16, release)
_attend_float = _attend_kernel("float", _attend, new_float, memory_float)
_attend_bf16_int8 = _attend_kernel("bf16_int8", _attend_bytes, new_bf16, memory_bytes)
_attend_float_int8 = _attend_kernel("float_int8", _attend_bytes, new_float, memory_bytes)


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
def _write_bf16_int8(a: Any) -> None:
    g = carray(a, SIZE)
    _write_bytes(g, a, new_bf16(g), memory_bytes(g))


@Kernel
def _write_float_int8(a: Any) -> None:
    g = carray(a, SIZE)
    _write_bytes(g, a, new_float(g), memory_bytes(g))


def kernels_for(
    keys: Tensor, values: Tensor, dtype: torch.dtype, instructions: InstructionSet
) -> tuple[Kernel, Kernel]:
    """Return two kernels for a cache [blocks, kv_heads, block_size, dim].

    The first kernel writes new keys and values, and the second kernel computes attention. dtype:
    that of the new rows. Raises ValueError if keys and values differ in shape.
    """
    if keys.shape != values.shape:
        raise ValueError(
            f"A key has {keys.shape[3]} numbers and a value has {values.shape[3]}, but the kernels "
            "need keys and values of the same size. Pad the shorter of the two with zeros."
        )
    if keys.dtype == torch.int8:
        if dtype == torch.float32:
            return _write_float_int8, _attend_float_int8
        return _write_bf16_int8, _attend_bf16_int8
    if keys.dtype == torch.float32:
        return _write_float, _attend_float
    size, dim = keys.shape[2:]
    if instructions == "amx" and fits_amx(size, dim):
        return _write_bf16, _attend_bf16_amx
    # `py_func` calls the function as Python code. Every process would have to compile the compiled
    # version again.
    if instructions == "bf16dot" and fits_vectors.py_func(size, dim):
        return _write_bf16, _attend_bf16_dot
    return _write_bf16, _attend_bf16
