"""Stores keys and values as int8 numbers, and multiplies with them.

Each key and each value of a head has one scale: number = byte * scale. The scale is chosen when the
position is written, from this position alone. So all later steps read the same numbers, however a
prompt was cut. Matrix products use the bytes without scales. Afterwards, the scores are multiplied
by the scales of the keys. The weights are multiplied by the scales of the values beforehand.
"""

from typing import Any

import numpy as np
from numba import njit

from headrace_kernels.blocks import fits_vectors, mix, positions_of, score
from headrace_kernels.int8_rows import LARGEST_BYTE, LEAST_SIZE, SCALE_BYTES
from headrace_kernels.numeric import largest_size, widen
from headrace_kernels.tiles import LANES

_PER_WORD = 4  # numbers


@njit(inline="always")
def _scales(block: Any, size: int) -> Any:
    """Return the scales of a head's block of bytes, float32 [positions]."""
    return block[block.size - size * SCALE_BYTES :].view(np.float32)


@njit(inline="always")
def _byte_at(first: int, second: int, width: int, has_words: bool) -> int:
    """Return the index of a byte in a matrix [.., width], stored in words or row by row."""
    if not has_words:
        return first * width + second
    word = first // _PER_WORD * width + second // LANES * LANES
    return word * _PER_WORD + first % _PER_WORD * LANES + second % LANES


@njit
def _quantize(numbers: Any) -> Any:
    """Return the scale of some numbers, and the factor that turns the numbers into bytes."""
    size = largest_size(numbers)
    if size < np.float32(LEAST_SIZE):
        return np.float32(0), np.float32(0)
    return size / np.float32(LARGEST_BYTE), np.float32(LARGEST_BYTE) / size


@njit
def write_bytes(keys: Any, values: Any, offset: int, k: Any, v: Any) -> None:
    """Round one position's key and value to bytes, and write both into a head's block."""
    dim = k.size
    size = keys.size // (dim + SCALE_BYTES)
    has_words = fits_vectors(size, dim)
    _scales(keys, size)[offset], by = _quantize(k)
    for i in range(dim):
        keys[_byte_at(i, offset, size, has_words)] = np.int8(np.rint(widen(k[i]) * by))
    _scales(values, size)[offset], by = _quantize(v)
    for i in range(dim):
        values[_byte_at(offset, i, dim, has_words)] = np.int8(np.rint(widen(v[i]) * by))


@njit
def _multiply_with_scales(cache: Any, past: Any, blocks: Any, columns: Any, dim: int) -> None:
    """Multiply each column [rows, positions] with the scale of its position in the blocks."""
    size, first = positions_of(cache, dim), 0
    for number in blocks:
        scales = _scales(cache[past.table[number], past.head], size)
        stop = min(first + size, columns.shape[1])
        for g in range(columns.shape[0]):
            row = columns[g, first:stop]
            for j in range(row.size):
                row[j] *= scales[j]
        first = stop


@njit
def score_bytes(q: Any, past: Any, blocks: Any, room: Any, scores: Any) -> None:
    """Compute scores [rows, positions of the blocks] = q [rows, dim] times the keys."""
    dim = q.shape[1]
    score(q, past, blocks, room, scores)
    count = len(blocks) * positions_of(past.keys, dim)
    _multiply_with_scales(past.keys, past, blocks, scores[:, :count], dim)


@njit
def mix_bytes(weights: Any, past: Any, blocks: Any, count: int, room: Any, acc: Any) -> None:
    """Add weights [rows, positions] times the first `count` values to acc [rows, dim].

    The weights are multiplied with the scales of the values, in place. The weights from `count` on
    keep their value of 0, because the scales of unwritten positions could be NaN.
    """
    _multiply_with_scales(past.values, past, blocks, weights[:, :count], acc.shape[1])
    mix(weights, past, blocks, count, room, acc)
