"""Owns keys and values of the cache laid out as panels, so that they multiply as weights do.

A panel of keys holds 32 positions for all inputs, one of values 32 columns for all positions; both
are what `multiply` takes: two inputs, or two positions, side by side for each of 32 outputs.
"""

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from headrace.runner.kernels.inplace import after, apart
from headrace.runner.kernels.product import multiply
from headrace.runner.kernels.tiles import LANES, PANEL, STEP, Matrix, fetch, load, picked

_WORDS = ir.VectorType(ir.IntType(32), LANES)  # two neighbours each
_NUMBERS = ir.VectorType(ir.IntType(16), STEP)


def _tile(arrange: Any, kind: Any, num_lines: int, are_below: bool) -> Any:
    """tile(source, target, (row, column, to_row, to_column), ahead), of 16-bit numbers.

    So many lines of the source are rearranged and put below each other, or into one row; what
    lies `ahead` bytes after them is fetched.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        source, target = (Matrix(context, builder, signature.args[i], args[i]) for i in range(2))
        row, column, to_row, to_column = cgutils.unpack_tuple(builder, args[2])
        numbers = [ir.IntType(64)(i) for i in range(num_lines)]
        lines = [source.at(builder.add(row, number), column) for number in numbers]
        for line in lines:
            fetch(builder, builder.add(line, args[3]))
        vectors = arrange(builder, [load(builder, line, kind, 2) for line in lines])
        first = target.at(to_row, to_column)
        stride = target.down if are_below else ir.IntType(64)(2 * STEP)
        for number, vector in zip(numbers, vectors, strict=True):
            address = builder.add(first, builder.mul(number, stride))
            builder.store(vector, builder.inttoptr(address, kind.as_pointer()), align=2)
        return context.get_dummy_value()

    def typed(typing: Any, source: Any, target: Any, places: Any, ahead: Any) -> Any:
        return types.void(source, target, places, types.int64), emit

    return intrinsic(typed)


def _turned(builder: Any, rows: list[Any]) -> list[Any]:
    """16 rows of 16 words as columns: rows exchange halves, then quarters, eighths and words."""
    half = LANES // 2
    while half:
        for i in range(LANES):
            if not i & half:
                pair = rows[i], rows[i + half]
                left = [j if not j & half else LANES + j - half for j in range(LANES)]
                right = [j + half if not j & half else LANES + j for j in range(LANES)]
                rows[i], rows[i + half] = (picked(builder, *pair, p) for p in (left, right))
        half //= 2
    return rows


def _zipped(builder: Any, rows: list[Any]) -> list[Any]:
    """32 numbers of two rows in turn."""
    left, right = rows
    halves = [[j // 2 + STEP * (j % 2) + k for j in range(STEP)] for k in (0, LANES)]
    return [picked(builder, left, right, lanes) for lanes in halves]


_turn_tile = _tile(_turned, _WORDS, LANES, are_below=True)
_zip_tile = _tile(_zipped, _NUMBERS, 2, are_below=False)


@njit
def can_pack(cache: Any) -> bool:
    """Whether blocks [blocks, kv_heads, size, dim] of bfloat16 bits divide into whole tiles."""
    return cache.itemsize == 2 and cache.shape[2] % LANES == 0 and cache.shape[3] % STEP == 0


@njit
def _pack_keys(block: Any, first: int, panels: Any, ahead: int) -> None:
    """Keys [size, dim] of a block as positions from `first` on of panels [any, dim/2, 2 * PANEL].

    The block `ahead` bytes after it is fetched.
    """
    for row in range(0, block.shape[0], LANES):
        position = first + row
        panel, column = panels[position // PANEL], 2 * (position % PANEL)
        for word in range(0, block.shape[1] // 2, LANES):
            _turn_tile(block, panel, (row, 2 * word, word, column), ahead)


@njit
def _pack_values(block: Any, first: int, panels: Any, ahead: int) -> None:
    """Values [size, dim] as positions from `first` on of panels [dim/PANEL, any, 2 * PANEL]."""
    for number in range(panels.shape[0]):
        panel = panels[number]
        for row in range(0, block.shape[0], 2):
            _zip_tile(block, panel, (row, number * PANEL, (first + row) // 2, 0), ahead)


@njit
def score_packed(q: Any, memory: Any, table: Any, blocks: Any, panels: Any, scores: Any) -> None:
    """`score` with the keys laid out as panels."""
    keys, kv, size, dim = memory[0], memory[2], memory[0].shape[2], memory[0].shape[3]
    laid_out = panels.reshape(-1, dim // 2, 2 * PANEL)
    for number in blocks:
        block, first = keys[table[number], kv], (number - blocks.start) * size
        _pack_keys(block, first, laid_out, apart(block, after(memory, table, blocks, number)))
    scores[:] = 0
    ones = np.ones((1, 1), np.float32)
    for first in range(0, scores.shape[1], PANEL):
        multiply(laid_out[first // PANEL], q, ones, q.shape[0], scores[:, first:], laid_out[:0, 0])


@njit
def mix_packed(weights: Any, memory: Any, table: Any, blocks: Any, panels: Any, acc: Any) -> None:
    """`mix` with the values laid out as panels; all that lie beyond the weights count nothing."""
    values, kv, size, dim = memory[1], memory[2], memory[1].shape[2], memory[1].shape[3]
    laid_out = panels.reshape(dim // PANEL, -1, 2 * PANEL)
    for number in blocks:
        block, first = values[table[number], kv], (number - blocks.start) * size
        following = values[table[min(number + 1, blocks.stop - 1)], kv]
        _pack_values(block, first, laid_out, apart(block, following))
    count = weights.shape[1]
    if count % 2:
        laid_out[:, count // 2, 1::2] = 0
    ones = np.ones((1, 1), np.float32)
    for number in range(dim // PANEL):
        lines, columns = laid_out[number, : (count + 1) // 2], acc[:, number * PANEL :]
        multiply(lines, weights, ones, weights.shape[0], columns, lines[:0])
