"""Defines the layout of keys and values in a cache block, and multiplies with many blocks.

A block is stored in words of 4 bytes. A word holds four int8 numbers, two bfloat16 numbers or one
float32 number. Keys are [dim, positions] and values are [positions, dim]. A word of bfloat16 joins
two neighbours along the first dimension. So a vector of words holds 16 positions of the keys or 16
columns of the values. With int8, the same 64 bytes hold 16 neighbours along the last dimension,
then the next 16 along the first dimension, and so on. Contiguous bytes are the fastest to widen.
Keys and values are multiplied in the same way as packed weights, so no sum runs across the lanes of
a vector.

A head's part of an int8 block ends with a float32 scale for each position (see blocks_int8.py).
"""

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from headrace_kernels.int8_rows import SCALE_BYTES
from headrace_kernels.numeric import FAST, widen
from headrace_kernels.registers import HAS_512, MAX_TILE_ROWS, padded_rows
from headrace_kernels.tiles import LANES, block_tile

WIDEST = 8  # vectors in a row of the widest tile
_WORD = 4  # bytes
_VECTOR = LANES * _WORD
if HAS_512:
    _tile_2x8, _tile_4x4 = block_tile(2, 8), block_tile(4, 4)
    _tile_2, _tile_4, _tile_8, _tile_12 = (block_tile(num_rows, 2) for num_rows in (2, 4, 8, 12))
else:
    _tile_2x2, _tile_4x1, _tile_6x1 = block_tile(2, 2), block_tile(4, 1), block_tile(6, 1)


@njit(inline="always")
def fits_vectors(size: int, dim: int) -> bool:
    return size % LANES == 0 and dim % LANES == 0


class Past(NamedTuple):
    """The cached keys and values of one kv head, with the block table of one sequence."""

    keys: Any  # [blocks, kv_heads, positions * dim (and scales, in an int8 cache)]
    values: Any  # the same shape
    table: Any  # block numbers of the sequence
    head: int


@njit(inline="always")
def positions_of(cache: Any, dim: int) -> int:
    """Return how many positions a block of the cache holds; dim: the size of a head."""
    size: int = cache.shape[2] // (dim + SCALE_BYTES if cache.itemsize == 1 else dim)
    return size


@njit(inline="always")
def per_word(cache: Any, dim: int) -> int:
    """Return how many numbers of the cache a word of 4 bytes holds.

    If the block's shape does not allow words of several numbers, return 1.
    """
    size = positions_of(cache, dim)
    if cache.itemsize == 1:
        return 4 if fits_vectors(size, dim) else 1
    return 2 if cache.itemsize == 2 and size % 2 == 0 and dim % 2 == 0 else 1


@njit(inline="always")
def key_at(offset: int, i: int, size: int, per: int) -> int:
    """Return the index at which a block stores number i of the key at position `offset`.

    per: how many numbers a word holds, 1 or 2. For words of four, see blocks_int8.py.
    """
    return ((i >> (per - 1)) * size + offset) * per + (i & (per - 1))


@njit(inline="always")
def value_at(offset: int, i: int, dim: int, per: int) -> int:
    return ((offset >> (per - 1)) * dim + i) * per + (offset & (per - 1))


@njit
def write_numbers(keys: Any, values: Any, offset: int, k: Any, v: Any) -> None:
    """Write one position's key and value into a head's block whose words hold one number each."""
    size = keys.size // k.size
    for i in range(k.size):
        keys[i * size + offset] = k[i]
    target = values[offset * v.size : (offset + 1) * v.size]
    for i in range(target.size):
        target[i] = v[i]


@njit
def write_pairs(keys: Any, values: Any, offset: int, k: Any, v: Any) -> None:
    """Write one position's key and value, as bfloat16 bits, into a head's block of uint32 words.

    A word holds two numbers. The first position of a tile also clears the values of the later
    positions in the tile. Until a position is written, its values are multiplied with weights of 0.
    Stale memory could hold infinities or NaN, whose product with 0 is NaN.
    """
    size = 2 * keys.size // k.size
    if offset % (2 * LANES) == 0:
        _clear(values[offset // 2 * v.size : (offset // 2 + LANES) * v.size])
    for i in range(k.size // 2):
        keys[i * size + offset] = np.uint32(k[2 * i]) | np.uint32(k[2 * i + 1]) << np.uint32(16)
    target = values[offset // 2 * v.size : (offset // 2 + 1) * v.size]
    if offset % 2:
        for i in range(target.size):
            target[i] = target[i] & np.uint32(0xFFFF) | np.uint32(v[i]) << np.uint32(16)
    else:
        for i in range(target.size):
            target[i] = v[i]


@njit
def _clear(words: Any) -> None:
    for i in range(words.size):
        words[i] = 0


@njit(inline="always")
def padded(num_rows: int) -> int:
    """Return how many rows the tiles read or write for `num_rows` rows."""
    return 2 if num_rows <= 2 else padded_rows(num_rows)


@njit
def _multiply_512(memory: Any, where: Any, places: Any, x: Any, out: Any) -> None:
    """Compute out = x times memory, or add the product to out, with tiles of 512-bit vectors.

    x: [rows, numbers of all lines]; out: [rows, 16 * columns].
    where: byte offsets of lines and byte offsets of columns. A vector of words is stored at the
    sum of its line's offset and its column's offset.
    places: the number of columns, whether to add to out, and the two distances of prefetches, in
    lines and in tiles.
    """
    num_columns, adds, more_lines, more_tiles = places
    num_rows, column = x.shape[0], 0
    wide = WIDEST if num_rows <= 2 else 4 if num_rows <= 4 else 2
    while column < num_columns:
        wide = wide if column + wide <= num_columns else 2
        for row in range(0, num_rows, MAX_TILE_ROWS):
            left, at = num_rows - row, (row, column, more_lines, wide * more_tiles, adds)
            if wide == WIDEST:
                _tile_2x8(memory, where, x, out, at)
            elif wide == 4:
                _tile_4x4(memory, where, x, out, at)
            elif left > 8:
                _tile_12(memory, where, x, out, at)
            elif left > 4:
                _tile_8(memory, where, x, out, at)
            elif left > 2:
                _tile_4(memory, where, x, out, at)
            else:
                _tile_2(memory, where, x, out, at)
        column += wide


@njit
def _multiply_256(memory: Any, where: Any, places: Any, x: Any, out: Any) -> None:
    """Compute the same as `_multiply_512` with tiles that fit into 16 registers."""
    num_columns, adds, more_lines, more_tiles = places
    num_rows = x.shape[0]
    if num_rows <= 2:
        for column in range(0, num_columns, 2):
            _tile_2x2(memory, where, x, out, (0, column, more_lines, 2 * more_tiles, adds))
        return
    for column in range(num_columns):
        for row in range(0, num_rows, MAX_TILE_ROWS):
            at = row, column, more_lines, more_tiles, adds
            if num_rows - row > 4:
                _tile_6x1(memory, where, x, out, at)
            else:
                _tile_4x1(memory, where, x, out, at)


_multiply = _multiply_512 if HAS_512 else _multiply_256


@njit(inline="always")
def begin_of(cache: Any, table: Any, kv: int, number: int) -> int:
    """Return the byte offset in the cache at which a kv head's part of a block begins."""
    begin: int = (table[number] * cache.shape[1] + kv) * cache.shape[2] * cache.itemsize
    return begin


@njit(inline="always")
def _from(cache: Any, other: Any) -> int:
    num_bytes: int = other.ctypes.data - cache.ctypes.data
    return num_bytes


@njit
def score(q: Any, past: Any, blocks: Any, room: Any, scores: Any) -> None:
    """Compute scores [rows, positions of the blocks] = q [rows, dim] times the keys.

    Each row of scores needs room for one more vector, which this function may write. `room` holds
    two int64 arrays for the offsets of lines and columns, including offsets that are only
    prefetched.
    """
    keys, values, table, kv = past
    dim = q.shape[1]
    size = positions_of(keys, dim)
    if not fits_vectors(size, dim):
        _score_one_by_one(q, past, blocks, scores)
        return
    lines, columns = room
    num_lines, num_columns = dim // per_word(keys, dim), 0
    for i in range(num_lines):
        lines[i] = i * size * _WORD
    for number in blocks:
        begin = begin_of(keys, table, kv, number)
        for vector in range(size // LANES):
            columns[num_columns] = begin + vector * _VECTOR
            num_columns += 1
    # These offsets are only prefetched, because `mix` will read the values there. If the number of
    # columns is odd, the first of these offsets also completes the last pair of columns.
    for i in range(WIDEST):
        number = min(blocks.start + i * LANES // size, blocks.stop - 1)
        columns[num_columns + i] = _from(keys, values) + begin_of(values, table, kv, number)
    _multiply(keys, (lines[:num_lines], columns), (num_columns, False, 0, 1), q, scores)


@njit
def mix(weights: Any, past: Any, blocks: Any, count: int, room: Any, acc: Any) -> None:
    """Add weights [rows, positions] times the first `count` values to acc [rows, dim].

    The blocks contain the values. If a word holds several positions, the weights up to the end of
    the last word are read too and must be 0.
    """
    keys, values, table, kv = past
    dim = acc.shape[1]
    size = positions_of(values, dim)
    if not fits_vectors(size, dim):
        _mix_one_by_one(weights, past, blocks, count, acc)
        return
    lines, columns = room
    per = per_word(values, dim)
    num_lines = 0
    for number in blocks:
        begin = begin_of(values, table, kv, number)
        for i in range(size // per):
            lines[num_lines] = begin + i * dim * _WORD
            num_lines += 1
    last = min(blocks.stop, table.size - 1)
    following = _from(values, keys) + begin_of(keys, table, kv, last)
    # The remaining lines are the keys of the next block, which are only prefetched.
    for i in range(size // per):
        lines[num_lines + i] = following + i * dim * _WORD
    num_columns = dim // LANES
    for i in range(num_columns + num_columns % 2):
        columns[i] = min(i, num_columns - 1) * _VECTOR
    used = lines[: (count + per - 1) // per]
    _multiply(values, (used, columns), (num_columns, True, size // per, 0), weights, acc)


@njit(fastmath=FAST)
def _score_one_by_one(q: Any, past: Any, blocks: Any, scores: Any) -> None:
    keys, _, table, kv = past
    dim = q.shape[1]
    size, per = positions_of(keys, dim), per_word(keys, dim)
    for number in blocks:
        block, first = keys[table[number], kv], (number - blocks.start) * size
        for g in range(q.shape[0]):
            for j in range(size):
                total = np.float32(0)
                for i in range(dim):
                    total += widen(block[key_at(j, i, size, per)]) * widen(q[g, i])
                scores[g, first + j] = total


@njit(fastmath=FAST)
def _mix_one_by_one(weights: Any, past: Any, blocks: Any, count: int, acc: Any) -> None:
    _, values, table, kv = past
    dim = acc.shape[1]
    size, per = positions_of(values, dim), per_word(values, dim)
    for j in range(count):
        block = values[table[blocks.start + j // size], kv]
        for g in range(acc.shape[0]):
            for i in range(dim):
                acc[g, i] += widen(weights[g, j]) * widen(block[value_at(j % size, i, dim, per)])
