"""Owns scores and weighted sums of few queries, whose keys and values are read where they lie."""

from typing import Any

import numpy as np
from numba import njit

from headrace.runner.kernels.numeric import FAST, widen
from headrace.runner.kernels.tiles import STEP, dot_tile, mix_tile

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
    def run(weights: Any, values: Any, column: int, ahead: int, acc: Any) -> None:
        g = 0
        while g + 4 <= acc.shape[0]:
            mix_4(values, weights, acc, (column, g), ahead)
            g += 4
        if g + 2 <= acc.shape[0]:
            mix_2(values, weights, acc, (column, g), ahead)
            g += 2
        if g < acc.shape[0]:
            mix_1(values, weights, acc, (column, g), ahead)

    return run


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


@njit(inline="always")
def apart(here: Any, there: Any) -> int:
    """Bytes between two blocks, the second a page that nothing else foresees."""
    num_bytes: int = there.ctypes.data - here.ctypes.data
    return num_bytes


@njit(inline="always")
def after(memory: Any, table: Any, blocks: Any, number: int) -> Any:
    """The keys read after those of a block; the first values after the last."""
    keys, values, kv = memory
    is_last = number + 1 == blocks.stop
    return values[table[blocks.start], kv] if is_last else keys[table[number + 1], kv]


@njit
def score(q: Any, memory: Any, table: Any, blocks: Any, scores: Any) -> None:
    """scores [queries, positions of the blocks]."""
    keys, _, kv = memory
    size = keys.shape[2]
    for number in blocks:
        block = keys[table[number], kv]
        ahead = apart(block, after(memory, table, blocks, number))
        _scores(q, block, ahead, scores, (number - blocks.start) * size)


@njit
def mix(weights: Any, memory: Any, table: Any, blocks: Any, span: Any, acc: Any) -> None:
    """acc += the weights times the values of positions [span)."""
    _, values, kv = memory
    size = values.shape[2]
    base = blocks.start * size
    for number in blocks:
        start = number * size
        low, high = max(span[0], start), min(span[1], start + size)
        block = values[table[number], kv]
        following = values[table[min(number + 1, blocks.stop - 1)], kv]
        part = block[low - start : high - start]
        _accumulate(weights[:, low - base : high - base], part, apart(block, following), acc)
