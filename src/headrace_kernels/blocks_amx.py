"""Multiplies with the keys and values of many blocks on AMX, if the block size fits AMX tiles."""

from typing import Any

import numpy as np
from numba import njit

from headrace_kernels.amx import DEEP, TILE, amx_tile, fetch_lines
from headrace_kernels.blocks import begin_of
from headrace_kernels.tiles import CACHE_LINE

_WORD = 4  # bytes
# The number of columns of two neighbouring tiles of sums.
_WIDE = 2 * TILE
_scores_2, _scores_1 = amx_tile(2, False), amx_tile(1, False)
_sums_2, _sums_1 = amx_tile(2, True), amx_tile(1, True)


def fits_amx(block_size: int, dim: int) -> bool:
    return block_size % DEEP == 0 and dim % DEEP == 0


@njit(inline="always")
def padded_amx(num_rows: int) -> int:
    """Return how many rows to allocate for queries, scores and sums.

    Up to TILE rows need no padding, because the tile is configured for exactly this number.
    """
    return num_rows if num_rows <= TILE else (num_rows + TILE - 1) // TILE * TILE


@njit
def score_amx(q: Any, past: Any, blocks: Any, room: Any, scores: Any) -> None:
    """Compute scores [rows, positions of the blocks] = q [rows, dim] times the keys.

    q holds bfloat16 bits. room[0] is int64 with room for at least dim / DEEP numbers.
    """
    keys, values, table, kv = past
    dim = q.shape[1]
    size, num_steps = keys.shape[2] // dim, dim // DEEP
    steps = room[0][:num_steps]
    for i in range(num_steps):
        steps[i] = i * TILE * size * _WORD
    for number in blocks:
        begin, other = begin_of(keys, table, kv, number), begin_of(values, table, kv, number)
        after = begin_of(keys, table, kv, min(number + 1, table.size - 1))
        for first in range(0, size, _WIDE):
            share = _WIDE * dim * 2
            there = np.int64(keys.ctypes.data) + after + first * dim * 2
            fetch_lines(np.int64(values.ctypes.data) + other + first * dim * 2, share // CACHE_LINE)
            column = (number - blocks.start) * size + first
            for row in range(0, q.shape[0], 2 * TILE):
                lines = share // CACHE_LINE // num_steps if row == 0 else 1
                at = (row, column, begin + first * _WORD, size * _WORD, there, lines)
                if q.shape[0] - row > TILE:
                    _scores_2(q, keys, steps, scores, at)
                else:
                    _scores_1(q, keys, steps, scores, at)


@njit
def mix_amx(weights: Any, past: Any, blocks: Any, count: int, room: Any, acc: Any) -> None:
    """Add weights [rows, positions] times the first `count` values to acc [rows, dim].

    The blocks contain the values. The weights are bfloat16 bits. The weights from `count` up to the
    next multiple of DEEP must be 0.
    """
    _, values, table, kv = past
    dim = acc.shape[1]
    size = values.shape[2] // dim
    num_steps = (count + DEEP - 1) // DEEP
    steps = room[0][:num_steps]
    for i in range(num_steps):
        number, offset = blocks.start + i * DEEP // size, i * DEEP % size
        steps[i] = begin_of(values, table, kv, number) + offset * dim * 2
    there = np.int64(values.ctypes.data) + steps[0]
    for column in range(0, dim, _WIDE):
        for row in range(0, weights.shape[0], 2 * TILE):
            at = (row, column, column * _WORD, dim * _WORD, there, 1)
            if weights.shape[0] - row > TILE:
                _sums_2(weights, values, steps, acc, at)
            else:
                _sums_1(weights, values, steps, acc, at)
