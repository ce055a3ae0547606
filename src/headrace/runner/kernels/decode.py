"""Owns attention of one query per sequence over its block table, and the writing of its position.

One pass over the cache, in any order of blocks: softmax is kept as a running maximum and sum.
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

LOWEST = np.float32(-1e30)  # below every score, and far from overflow
_SPAN = 256  # positions whose scores are weighed together


@njit(fastmath=FAST)
def _scores(q: Any, keys: Any, first: int, stop: int, out: Any) -> None:
    """Products of q with keys [first, stop), four at a time."""
    j = first
    while j + 4 <= stop:
        k0, k1, k2, k3 = keys[j], keys[j + 1], keys[j + 2], keys[j + 3]
        a = b = c = d = np.float32(0)
        for i in range(q.size):
            a += widen(k0[i]) * q[i]
            b += widen(k1[i]) * q[i]
            c += widen(k2[i]) * q[i]
            d += widen(k3[i]) * q[i]
        n = j - first
        out[n], out[n + 1], out[n + 2], out[n + 3] = a, b, c, d
        j += 4
    while j < stop:
        k0 = keys[j]
        a = np.float32(0)
        for i in range(q.size):
            a += widen(k0[i]) * q[i]
        out[j - first] = a
        j += 1


@njit(fastmath=FAST)
def _accumulate(weights: Any, values: Any, first: int, stop: int, acc: Any) -> None:
    """Adds weighted values [first, stop) to acc, four at a time."""
    j = first
    while j + 4 <= stop:
        v0, v1, v2, v3 = values[j], values[j + 1], values[j + 2], values[j + 3]
        n = j - first
        a, b, c, d = weights[n], weights[n + 1], weights[n + 2], weights[n + 3]
        for i in range(acc.size):
            left = a * widen(v0[i]) + b * widen(v1[i])
            acc[i] += left + (c * widen(v2[i]) + d * widen(v3[i]))
        j += 4
    while j < stop:
        v0 = values[j]
        a = weights[j - first]
        for i in range(acc.size):
            acc[i] += a * widen(v0[i])
        j += 1


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


@njit
def _take(q: Any, memory: Any, table: Any, span: Any, state: Any) -> None:
    """Adds positions [span) of one kv head's past: all their scores first, then all values."""
    (keys, values, kv), (first, stop), (scores, acc, running) = memory, span, state
    size = keys.shape[2]
    blocks = range(first // size, (stop + size - 1) // size)
    for number in blocks:
        start = number * size
        low, high = max(first, start), min(stop, start + size)
        for g in range(q.shape[0]):
            out = scores[g, low - first : high - first]
            _scores(q[g], keys[table[number], kv], low - start, high - start, out)
    for g in range(q.shape[0]):
        _weigh(scores[g, : stop - first], acc[g], running[g])
    for number in blocks:
        start = number * size
        low, high = max(first, start), min(stop, start + size)
        for g in range(q.shape[0]):
            weights = scores[g, low - first : high - first]
            _accumulate(weights, values[table[number], kv], low - start, high - start, acc[g])


@njit(fastmath=FAST)
def _attend(q: Any, memory: Any, table: Any, span: Any, tops: Any, out: Any) -> None:
    """Queries [heads of one kv head, dim] over positions [span) of a sequence's blocks.

    `memory`: keys and values [num_blocks, kv_heads, block_size, dim], and which kv head. `tops`
    holds the heads' sinks, scores without a value, or is empty.
    """
    first, stop = span
    acc = np.zeros(q.shape, np.float32)
    scores = np.empty((q.shape[0], _SPAN), np.float32)
    running = np.zeros((q.shape[0], 2), np.float32)
    for g in range(q.shape[0]):
        running[g, 0] = tops[g] if tops.size else LOWEST
        running[g, 1] = np.float32(1) if tops.size else np.float32(0)
    while first < stop:
        end = min(stop, (first // _SPAN + 1) * _SPAN)
        _take(q, memory, table, (first, end), (scores, acc, running))
        first = end
    for g in range(q.shape[0]):
        inverse = np.float32(1) / running[g, 1]
        for i in range(q.shape[1]):
            out[g * q.shape[1] + i] = narrow(acc[g, i] * inverse, out[0])


@njit(fastmath=FAST)
def _scaled(row: Any, group: int, dim: int) -> Any:
    """One kv head's queries as float32 [group, dim], with the scale of the scores in them."""
    scale = np.float32(1) / np.sqrt(np.float32(dim))
    q = np.empty((group, dim), np.float32)
    for g in range(group):
        for i in range(dim):
            q[g, i] = widen(row[g * dim + i]) * scale
    return q


@njit
def _write(row: Any, new: Any) -> None:
    for i in range(row.size):
        row[i] = new[i]


@njit
def _decode(g: Any, a: Any, new: Any, memory: Any, chunks: Any) -> None:
    """A piece of work is one kv head of one chunk: its own position is written, then it attends."""
    q, k, v, out = new
    keys, values = memory
    which, starts, first_rows, table = chunks
    kv_heads, size, dim, group = g[KV_HEADS], g[BLOCK_SIZE], g[DIM], g[GROUP]
    sinks = carray(f32_at(g[SINKS]), g[NUM_SINKS])
    while True:
        piece: int = take_next(a)
        if piece >= which.size * kv_heads:
            break
        chunk, kv = which[piece // kv_heads], piece % kv_heads
        row, position = first_rows[chunk], starts[chunk]
        block, offset = table[chunk, position // size], position % size
        _write(keys[block, kv, offset], k[row, kv * dim : (kv + 1) * dim])
        _write(values[block, kv, offset], v[row, kv * dim : (kv + 1) * dim])
        heads = slice(kv * group * dim, (kv + 1) * group * dim)
        _attend(
            _scaled(q[row, heads], group, dim),
            (keys, values, kv),
            table[chunk],
            (first_visible(position, g[WINDOW]), position + 1),
            sinks[kv * group : (kv + 1) * group] if sinks.size else sinks,
            out[row, heads],
        )


@Kernel
def _decode_bf16(a: Any) -> None:
    g = carray(a, FRAME_SIZE)
    _decode(g, a, new_bf16(g), memory_bf16(g), chunks_of(g))


@Kernel
def _decode_float(a: Any) -> None:
    g = carray(a, FRAME_SIZE)
    _decode(g, a, new_float(g), memory_float(g), chunks_of(g))


DECODE = {torch.bfloat16: _decode_bf16, torch.float32: _decode_float}
"""By the cache's dtype; the frame is that of frame.py, with the chunks of length 1 in `WHICH`."""
