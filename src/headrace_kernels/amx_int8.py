"""Multiplies rows with int8 panels on AMX, bit for bit as the vector kernels do.

Rows are int16, but AMX multiplies bytes. So each number is split into a signed upper byte and an
unsigned lower byte: number = 256 * upper + lower. AMX multiplies the bytes with the weights, and
sums the products of a group exactly, upper and lower bytes separately. 256 times the upper sum
plus the lower sum is the exact sum of the vector kernels.
"""

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from headrace_kernels.amx import TILE, call, configure, fetch_lines, move, release
from headrace_kernels.tiles import (
    CACHE_LINE,
    FLOATS,
    INTS,
    LANES,
    PANEL,
    add_product,
    empty_rows,
    load,
    loop,
    picked,
    spread_over,
)

# The number of inputs that share a scale. The products of a group are summed exactly.
GROUP = 128
_STEP = 64  # inputs
# Numbers of tile registers. Registers 0 and 1 sum upper bytes; registers 2 and 3 sum lower bytes.
_UPPER, _LOWER, _RIGHT = 4, 5, 6
_TILE_BYTES = TILE * CACHE_LINE
_BYTE, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)


def _emit_group(typing: Any, rows: Any, right: Any, tile_bytes: Any, num: Any, sums: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        b, (rows, right, tile_bytes, num_steps, sums) = builder, args
        row, apart, lower = cgutils.unpack_tuple(b, rows)
        line, second = _I64(CACHE_LINE), b.add(tile_bytes, tile_bytes)
        for register in range(4):
            call(b, "tilezero", _BYTE(register))

        def body(at: Any, values: list[Any]) -> list[Any]:
            left, weights = values
            move(b, "tileloadd64", _UPPER, left, apart)
            move(b, "tileloadd64", _LOWER, b.add(left, lower), apart)
            for n, place in enumerate((weights, b.add(weights, tile_bytes))):
                move(b, "tileloadd64", _RIGHT + n, place, line)
            for n in range(2):
                call(b, "tdpbssd", *map(_BYTE, (n, _UPPER, _RIGHT + n)))
                call(b, "tdpbusd", *map(_BYTE, (2 + n, _LOWER, _RIGHT + n)))
            return [b.add(left, _I64(_STEP)), b.add(weights, second)]

        loop(b, num_steps, [row, right], body)
        for register in range(4):
            place = b.add(sums, _I64(register * _TILE_BYTES))
            move(b, "tilestored64", register, place, line)
        return context.get_dummy_value()

    return types.void(rows, *[types.int64] * 4), emit


sum_group: Any = intrinsic(_emit_group)
"""sum_group((row, apart, lower), right, tile_bytes, num_steps, sums): sums a group's products.

row, right, sums: addresses of the rows, the weights and the four tiles of sums to be written.
apart: bytes from one row to the next. lower: bytes from a row's upper bytes to its lower bytes.
tile_bytes: bytes from one weight tile of a step to the other weight tile. The tiles must be
configured for the number of rows.
"""


def whole_sum(builder: Any, place: Any, half: int) -> Any:
    """Return a row's sums for one half of the outputs, as floats.

    Combines the sums of upper bytes with the sums of lower bytes.
    """
    b = builder
    upper, lower = (
        load(b, b.add(place, _I64(k * _TILE_BYTES)), INTS, CACHE_LINE) for k in (half, 2 + half)
    )
    return b.sitofp(b.add(b.shl(upper, INTS([8] * LANES)), lower), FLOATS)


def _emit_add(typing: Any, sums: Any, scales: Any, apart: Any, out: Any, num_rows: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        b, (sums, scales, apart, out, num_rows) = builder, args

        def body(at: Any, values: list[Any]) -> list[Any]:
            own, scale, place = values
            by = spread_over(b, load(b, scale, FLOATS.element, 4))
            for n in range(2):
                address = b.add(place, _I64(4 * LANES * n))
                total = load(b, address, FLOATS, 4)
                total = add_product(b, total, whole_sum(b, own, n), by)
                b.store(total, b.inttoptr(address, FLOATS.as_pointer()), align=4)
            return [
                b.add(own, _I64(CACHE_LINE)),
                b.add(scale, apart),
                b.add(place, _I64(4 * PANEL)),
            ]

        loop(b, num_rows, [sums, scales, out], body)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), emit


_add_group: Any = intrinsic(_emit_add)
"""_add_group(sums, scales, apart, out, num_rows): adds scaled sums to rows of PANEL floats."""


def by_fours(bits: int) -> Any:
    """Return an intrinsic lay(lines, target, count, tile_bytes) that reorders weights for AMX.

    A line of a panel holds two inputs of every output, and a row of a tile holds four inputs. So
    the intrinsic merges two lines into one row of each of two tiles, `count` times. Outputs 0 to 15
    are written to `target`; outputs 16 to 31 are written `tile_bytes` later.
    """
    bytes_, words = ir.VectorType(_BYTE, PANEL), ir.VectorType(ir.IntType(16), PANEL)
    narrow = ir.VectorType(ir.IntType(16), LANES)
    orders = [[n // 2 + n % 2 * PANEL + LANES * half for n in range(PANEL)] for half in (0, 1)]

    def halves_of(b: Any, line: Any) -> list[Any]:
        if bits == 8:
            pair = [load(b, b.add(line, _I64(n)), words, 1) for n in (0, CACHE_LINE)]
            return [picked(b, pair[0], pair[1], order) for order in orders]
        pair = [load(b, b.add(line, _I64(n)), bytes_, 1) for n in (0, PANEL)]
        low = [b.bitcast(b.and_(part, bytes_([15] * PANEL)), narrow) for part in pair]
        high = [b.bitcast(b.lshr(part, bytes_([4] * PANEL)), narrow) for part in pair]
        order = [n // 2 + n % 2 * LANES for n in range(PANEL)]
        return [picked(b, both[0], both[1], order) for both in (low, high)]

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        b, (lines, target, count, tile_bytes) = builder, args

        def body(at: Any, values: list[Any]) -> list[Any]:
            first = values[1]
            places = first, b.add(first, tile_bytes)
            for place, line in zip(places, halves_of(b, values[0]), strict=True):
                b.store(line, b.inttoptr(place, words.as_pointer()), align=CACHE_LINE)
            return [b.add(values[0], _I64(bits * 16)), b.add(first, _I64(CACHE_LINE))]

        loop(b, count, [lines, target], body)
        return context.get_dummy_value()

    def typed(typing: Any, lines: Any, target: Any, count: Any, tile_bytes: Any) -> Any:
        return types.void(*[types.int64] * 4), emit

    return intrinsic(typed)


_lay_out = by_fours(8)


@njit
def place_of(array: Any) -> Any:
    return np.int64(array.ctypes.data)


@njit
def split(row: Any, num_inputs: int) -> None:
    """Reorder the int16 numbers of a row in place: first all upper bytes, then all lower bytes."""
    numbers, planes = row[:num_inputs].copy(), row.view(np.int8)
    for k in range(num_inputs):
        planes[k] = numbers[k] >> 8
    lower = planes[num_inputs:]
    for k in range(num_inputs):
        lower[k] = np.int8(numbers[k] & 255)


@njit
def multiply_bytes(w: Any, x: Any, scales: Any, num_rows: int, out: Any, after: Any) -> None:
    """Add the product of x and w to `out`.

    w [lines, numbers] is a panel whose number of inputs is a multiple of GROUP. The rows of x are
    in the byte order of `split`.
    """
    num_inputs, num_groups, apart = 2 * w.shape[0], scales.shape[1], 2 * x.shape[1]
    room, sums = empty_rows(w.shape[0], PANEL, np.uint16), empty_rows(4 * TILE, LANES, np.float32)
    panel, tiles, own = place_of(w), place_of(room), place_of(sums)
    for step in range(num_inputs // _STEP):
        at = step * _STEP * PANEL
        _lay_out(panel + at, tiles + at, TILE, _TILE_BYTES)
    table = np.zeros(64, np.uint8)
    num_tiles = (num_rows + TILE - 1) // TILE
    share = max(w.size // (num_tiles * num_groups * CACHE_LINE), 1)
    there, configured = place_of(after), 0
    for first in range(0, num_rows, TILE):
        rows = min(num_rows - first, TILE)
        if rows != configured:
            configured = rows
            configure(table, rows, rows)
        row, target = place_of(x[first:]), place_of(out[first:])
        for group in range(num_groups):
            right, steps = tiles + group * GROUP * PANEL, GROUP // _STEP
            rows_of = row + group * GROUP, apart, num_inputs
            sum_group(rows_of, right, _TILE_BYTES, steps, own)
            _add_group(own, place_of(scales[first:, group:]), 4 * num_groups, target, rows)
            fetch_lines(there, share)
            there += share * CACHE_LINE
    release()
