"""Owns the two kernels around the matrix products of a prompt chunk's attention.

`GATHER` writes a chunk's keys and values into block memory and lays the whole past out in a row;
`SOFTMAX` turns scores into weights in place, row by row up to each row's own position.
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
    KV_HEADS,
    chunks_of,
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
    u16_at,
    widen,
)
from headrace.runner.kernels.pool import Kernel
from headrace.runner.kernels.short import LOWEST

# After the frame of the attention itself:
(CHUNK, BASE, TOTAL, PAST_KEYS, PAST_VALUES, GATHER_SIZE) = range(FRAME_SIZE, FRAME_SIZE + 6)


@njit
def _lay_out(past: Any, cache: Any, new: Any, head: int, span: Any, at: Any) -> None:
    """Positions [span) of one block: old ones from the cache, new ones into it, all into past."""
    first, stop = span
    block, start, row, base, size = at
    dim = past.shape[2]
    for position in range(first, stop):
        offset = position % size
        if position >= start:
            source = new[row + position - start]
            for i in range(dim):
                cache[block, head, offset, i] = source[head * dim + i]
        stored, target = cache[block, head, offset], past[head, position - base]
        for i in range(dim):
            target[i] = narrow(widen(stored[i]), past[0, 0, 0])


@njit
def _gather(g: Any, a: Any, new: Any, memory: Any, past: Any) -> None:
    """A piece of work is one block of one kv head; `BASE` is the first position of a block."""
    _, starts, _, first_rows, table = chunks_of(g)
    chunk, base, total = g[CHUNK], g[BASE], g[TOTAL]
    heads, size = g[KV_HEADS], g[BLOCK_SIZE]
    num_blocks = (total - base + size - 1) // size
    while True:
        piece: int = take_next(a)
        if piece >= num_blocks * heads:
            break
        head, number = piece // num_blocks, base // size + piece % num_blocks
        span = (number * size, min(number * size + size, total))
        at = (table[chunk, number], starts[chunk], first_rows[chunk], base, size)
        _lay_out(past[0], memory[0], new[1], head, span, at)
        _lay_out(past[1], memory[1], new[2], head, span, at)


@njit
def _past_bf16(g: Any) -> Any:
    shape = (g[KV_HEADS], g[TOTAL] - g[BASE], g[DIM])
    return carray(u16_at(g[PAST_KEYS]), shape), carray(u16_at(g[PAST_VALUES]), shape)


@njit
def _past_float(g: Any) -> Any:
    shape = (g[KV_HEADS], g[TOTAL] - g[BASE], g[DIM])
    return carray(f32_at(g[PAST_KEYS]), shape), carray(f32_at(g[PAST_VALUES]), shape)


@Kernel
def _gather_bf16(a: Any) -> None:
    g = carray(a, GATHER_SIZE)
    _gather(g, a, new_bf16(g), memory_bf16(g), _past_bf16(g))


@Kernel
def _gather_widening(a: Any) -> None:
    g = carray(a, GATHER_SIZE)
    _gather(g, a, new_bf16(g), memory_bf16(g), _past_float(g))


@Kernel
def _gather_float(a: Any) -> None:
    g = carray(a, GATHER_SIZE)
    _gather(g, a, new_float(g), memory_float(g), _past_float(g))


GATHER = {
    (torch.bfloat16, torch.bfloat16): _gather_bf16,
    (torch.bfloat16, torch.float32): _gather_widening,
    (torch.float32, torch.float32): _gather_float,
}
"""By the cache's dtype and that of the laid out past."""


@njit(fastmath=FAST)
def _weigh(row: Any, first: int, stop: int, sink: Any) -> Any:
    """Scores [first, stop) of a row become weights, all others 0; returns 1 / their sum."""
    scores = row[first:stop]
    top = largest(scores, sink)
    # One loop each for what is stored and what is summed: together they are not vectorized.
    for j in range(scores.size):
        scores[j] = narrow(fast_exp(widen(scores[j]) - top), scores[0])
    total = np.float32(0)
    for j in range(scores.size):
        total += widen(scores[j])
    row[:first] = 0
    row[stop:] = 0
    return np.float32(1) / (total + fast_exp(sink - top))


@njit
def _softmax(g: Any, a: Any, scores: Any) -> None:
    """scores: [kv_heads, queries * group, keys]; key j is position BASE + j, query i START + i."""
    heads, rows, _ = scores.shape
    group, start, window = g[4], g[5], g[6]
    sinks = carray(f32_at(g[7]), g[8])
    inverse = carray(f32_at(g[9]), (heads, rows))
    while True:
        piece: int = take_next(a)
        if piece >= heads * (rows // group):
            break
        head, query = piece % heads, piece // heads
        stop = start + query + 1
        first = max(0, stop - window) if window else 0
        for i in range(group):
            sink = sinks[head * group + i] if sinks.size else LOWEST
            row = query * group + i
            inverse[head, row] = _weigh(scores[head, row], first, stop, sink)


@Kernel
def _softmax_bf16(a: Any) -> None:
    g = carray(a, 11)
    _softmax(g, a, carray(u16_at(g[10]), (g[1], g[2], g[3])))


@Kernel
def _softmax_float(a: Any) -> None:
    g = carray(a, 11)
    _softmax(g, a, carray(f32_at(g[10]), (g[1], g[2], g[3])))


SOFTMAX = {torch.bfloat16: _softmax_bf16, torch.float32: _softmax_float}
"""Frame: kv_heads, rows, keys, group, start, window, sinks, their number, inverse, scores."""
