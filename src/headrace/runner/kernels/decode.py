"""Owns attention of one query per sequence over its block table, and the writing of its position.

One pass over the cache, in any order of blocks: softmax is kept as a running maximum and sum.
"""

from typing import Any

import numpy as np
import torch
from numba import cfunc, njit
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
    KERNEL,
    f32_at,
    fast_exp,
    narrow,
    take_next,
    widen,
)

LOWEST = np.float32(-1e30)  # below every score, and far from overflow


@njit(fastmath=FAST)
def _scores(q: Any, keys: Any, first: int, stop: int, out: Any) -> Any:
    """Products of q with keys [first, stop), and the largest of them."""
    j = first
    while j + 4 <= stop:
        k0, k1, k2, k3 = keys[j], keys[j + 1], keys[j + 2], keys[j + 3]
        a = b = c = d = np.float32(0)
        for i in range(q.size):
            a += widen(k0[i]) * q[i]
            b += widen(k1[i]) * q[i]
            c += widen(k2[i]) * q[i]
            d += widen(k3[i]) * q[i]
        out[j], out[j + 1], out[j + 2], out[j + 3] = a, b, c, d
        j += 4
    while j < stop:
        k0 = keys[j]
        a = np.float32(0)
        for i in range(q.size):
            a += widen(k0[i]) * q[i]
        out[j] = a
        j += 1
    top = out[first]
    for j in range(first + 1, stop):
        top = max(top, out[j])
    return top


@njit(fastmath=FAST)
def _accumulate(weights: Any, values: Any, first: int, stop: int, acc: Any) -> None:
    j = first
    while j + 4 <= stop:
        v0, v1, v2, v3 = values[j], values[j + 1], values[j + 2], values[j + 3]
        a, b, c, d = weights[j], weights[j + 1], weights[j + 2], weights[j + 3]
        for i in range(acc.size):
            acc[i] += a * widen(v0[i]) + b * widen(v1[i]) + (c * widen(v2[i]) + d * widen(v3[i]))
        j += 4
    while j < stop:
        v0 = values[j]
        a = weights[j]
        for i in range(acc.size):
            acc[i] += a * widen(v0[i])
        j += 1


@njit(fastmath=FAST)
def _take_block(q: Any, keys: Any, values: Any, span: Any, state: Any) -> None:
    """Adds the positions [span) of one block to a head's state: weights, acc, top and sum."""
    first, stop = span
    weights, acc, running = state
    top = max(running[0], _scores(q, keys, first, stop, weights))
    shrink = fast_exp(running[0] - top)
    total = np.float32(0)
    for j in range(first, stop):
        weights[j] = fast_exp(weights[j] - top)
        total += weights[j]
    if shrink != np.float32(1):
        for i in range(acc.size):
            acc[i] *= shrink
    _accumulate(weights, values, first, stop, acc)
    running[0] = top
    running[1] = running[1] * shrink + total


@njit(fastmath=FAST)
def _attend(q: Any, past: Any, table: Any, span: Any, tops: Any, out: Any) -> None:
    """Queries [heads of one kv head, dim] over positions [first, stop) of a sequence's blocks.

    `past`: keys and values of that kv head, [num_blocks, block_size, dim]. `tops` holds the
    heads' sinks, scores without a value, or is empty.
    """
    first, stop = span
    keys, values = past
    size = keys.shape[1]
    acc = np.zeros(q.shape, np.float32)
    weights = np.empty(size, np.float32)
    running = np.zeros((q.shape[0], 2), np.float32)
    for g in range(q.shape[0]):
        running[g, 0] = tops[g] if tops.size else LOWEST
        running[g, 1] = np.float32(1) if tops.size else np.float32(0)
    for number in range(first // size, (stop + size - 1) // size):
        block = table[number]
        inside = (max(first - number * size, 0), min(stop - number * size, size))
        for g in range(q.shape[0]):
            state = (weights, acc[g], running[g])
            _take_block(q[g], keys[block], values[block], inside, state)
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
def _write(cache: Any, block: int, offset: int, row: Any) -> None:
    for i in range(row.size):
        cache[block, offset, i] = row[i]


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
        _write(keys[:, kv], block, offset, k[row, kv * dim : (kv + 1) * dim])
        _write(values[:, kv], block, offset, v[row, kv * dim : (kv + 1) * dim])
        heads = slice(kv * group * dim, (kv + 1) * group * dim)
        _attend(
            _scaled(q[row, heads], group, dim),
            (keys[:, kv], values[:, kv]),
            table[chunk],
            (first_visible(position, g[WINDOW]), position + 1),
            sinks[kv * group : (kv + 1) * group] if sinks.size else sinks,
            out[row, heads],
        )


@cfunc(KERNEL, cache=True)
def _decode_bf16(a: Any) -> None:
    g = carray(a, FRAME_SIZE)
    _decode(g, a, new_bf16(g), memory_bf16(g), chunks_of(g))


@cfunc(KERNEL, cache=True)
def _decode_float(a: Any) -> None:
    g = carray(a, FRAME_SIZE)
    _decode(g, a, new_float(g), memory_float(g), chunks_of(g))


DECODE = {torch.bfloat16: _decode_bf16, torch.float32: _decode_float}
"""By the cache's dtype; the frame is that of frame.py, with the chunks of length 1 in `WHICH`."""
