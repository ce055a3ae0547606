"""Owns how keys and values lie in a block of the cache, and products with those of many blocks.

Both are words of 4 bytes, of two bfloat16 or one float32 number: keys [dim, positions], values
[positions, dim], where a word holds neighbours of the first. So a vector holds 16 positions of keys
or 16 numbers of values, and both multiply as weights do, without sums across a vector.
"""

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from headrace_kernels.numeric import FAST, widen
from headrace_kernels.registers import HAS_512, MANY, reached
from headrace_kernels.tiles import LANES, block_tile

WIDEST = 8  # vectors of a tile
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
    """The keys and values of one kv head of a sequence."""

    keys: Any  # [blocks, kv_heads, numbers of a block]
    values: Any
    table: Any  # the sequence's blocks
    head: int


@njit(inline="always")
def per_word(cache: Any, dim: int) -> int:
    """Numbers in a word of a cache [blocks, kv_heads, size * dim]."""
    size = cache.shape[2] // dim
    return 2 if cache.itemsize == 2 and size % 2 == 0 and dim % 2 == 0 else 1


@njit(inline="always")
def key_at(offset: int, i: int, size: int, per: int) -> int:
    """Where in its block number i of the key of one position lies; per: 1 or 2."""
    return ((i >> (per - 1)) * size + offset) * per + (i & (per - 1))


@njit(inline="always")
def value_at(offset: int, i: int, dim: int, per: int) -> int:
    return ((offset >> (per - 1)) * dim + i) * per + (offset & (per - 1))


@njit
def write_numbers(keys: Any, values: Any, offset: int, k: Any, v: Any) -> None:
    """The key and value of one position into one head's block, whose words are the numbers."""
    size = keys.size // k.size
    for i in range(k.size):
        keys[i * size + offset] = k[i]
    target = values[offset * v.size : (offset + 1) * v.size]
    for i in range(target.size):
        target[i] = v[i]


@njit
def write_pairs(keys: Any, values: Any, offset: int, k: Any, v: Any) -> None:
    """The same of bfloat16 bits into words of two, as uint32.

    The values of positions after it that share a tile become 0 with the first of them: until they
    are written they meet weights of 0, and what lay there before might not be finite.
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
    """Rows that tiles reach, of queries, of scores and of sums."""
    return 2 if num_rows <= 2 else reached(num_rows)


@njit
def _multiply_512(memory: Any, where: Any, places: Any, x: Any, out: Any) -> None:
    """out [rows, 16 * columns] (+)= x [rows, numbers of lines] times what lies in memory.

    where: lines and columns, in bytes, which add up. places: the number of columns, whether to add,
    and what is fetched with each tile: how many lines, how many tiles after it.
    """
    num_columns, adds, more_lines, more_tiles = places
    num_rows, column = x.shape[0], 0
    wide = WIDEST if num_rows <= 2 else 4 if num_rows <= 4 else 2
    while column < num_columns:
        wide = wide if column + wide <= num_columns else 2
        for row in range(0, num_rows, MANY):
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
    """The same by the tiles that 16 registers hold."""
    num_columns, adds, more_lines, more_tiles = places
    num_rows = x.shape[0]
    if num_rows <= 2:
        for column in range(0, num_columns, 2):
            _tile_2x2(memory, where, x, out, (0, column, more_lines, 2 * more_tiles, adds))
        return
    for column in range(num_columns):
        for row in range(0, num_rows, MANY):
            at = row, column, more_lines, more_tiles, adds
            if num_rows - row > 4:
                _tile_6x1(memory, where, x, out, at)
            else:
                _tile_4x1(memory, where, x, out, at)


_multiply = _multiply_512 if HAS_512 else _multiply_256


@njit(inline="always")
def begin_of(cache: Any, table: Any, kv: int, number: int) -> int:
    """Bytes from a cache's begin to one head of a sequence's block."""
    begin: int = (table[number] * cache.shape[1] + kv) * cache.shape[2] * cache.itemsize
    return begin


@njit(inline="always")
def _from(cache: Any, other: Any) -> int:
    num_bytes: int = other.ctypes.data - cache.ctypes.data
    return num_bytes


@njit
def score(q: Any, past: Any, blocks: Any, room: Any, scores: Any) -> None:
    """scores [rows, positions of the blocks and up to a vector more] = q [rows, dim] times keys.

    room: int64 arrays, for as many lines and columns as a span of blocks has, and those that are
    fetched after it.
    """
    keys, values, table, kv = past
    dim = q.shape[1]
    size = keys.shape[2] // dim
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
    for i in range(WIDEST):  # read next, or in place of what makes the last pair whole
        number = min(blocks.start + i * LANES // size, blocks.stop - 1)
        columns[num_columns + i] = _from(keys, values) + begin_of(values, table, kv, number)
    _multiply(keys, (lines[:num_lines], columns), (num_columns, False, 0, 1), q, scores)


@njit
def mix(weights: Any, past: Any, blocks: Any, count: int, room: Any, acc: Any) -> None:
    """acc [rows, dim] += weights [rows, positions] times the first `count` values of the blocks.

    One weight more is read; it must be 0 if count is odd.
    """
    keys, values, table, kv = past
    dim = acc.shape[1]
    size = values.shape[2] // dim
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
    for i in range(size // per):  # the keys that are read next
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
    size, per = keys.shape[2] // dim, per_word(keys, dim)
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
    size, per = values.shape[2] // dim, per_word(values, dim)
    for j in range(count):
        block = values[table[blocks.start + j // size], kv]
        for g in range(acc.shape[0]):
            for i in range(dim):
                acc[g, i] += widen(weights[g, j]) * widen(block[value_at(j % size, i, dim, per)])
