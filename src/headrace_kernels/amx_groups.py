"""Multiplies rows with panels of grouped weights on AMX, bit for bit as the vector kernels do."""

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from headrace_kernels.amx import TILE, fetch_lines, load_table, release
from headrace_kernels.amx_int8 import by_fours, place_of, sum_group, whole_sum
from headrace_kernels.numeric import compiled_as
from headrace_kernels.tiles import (
    CACHE_LINE,
    FLOATS,
    LANES,
    PANEL,
    empty_rows,
    fused,
    halves,
    load,
    loop,
    spread_over,
)

_I64 = ir.IntType(64)


@njit
def _configure(table: Any, rows: int, size: int) -> None:
    """Configure the tiles for `rows` rows and groups of `size` inputs.

    The weight tiles hold four inputs of an output side by side. table: uint8 [64], all zeros at
    the first call.
    """
    table[0] = 1
    for register in range(8):
        table[48 + register] = size // 4 if register >= 6 else rows
        table[16 + 2 * register] = size if register in (4, 5) else CACHE_LINE
    load_table(table)


def _add_group(has_minimum: bool) -> Any:
    """Return an intrinsic add((sums, factors, apart), head, out, num_rows).

    The intrinsic scales the sums of one group and adds the results to the rows of `out`. Address
    `head` has the group's scales, followed by the group's minima if the format has minima. Address
    `factors` has two numbers of the first row: its scale, and the sum of its inputs in the group.
    The two numbers of each following row are `apart` bytes later.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        b, (of, head, out, num_rows) = builder, args
        sums, factors, apart = cgutils.unpack_tuple(b, of)
        scales = halves(b, head)
        minima = halves(b, b.add(head, _I64(2 * PANEL))) if has_minimum else []

        def body(at: Any, values: list[Any]) -> list[Any]:
            own, factor, row = values
            numbers = [load(b, b.add(factor, _I64(n)), FLOATS.element, 4) for n in (0, 4)]
            scale, whole = (spread_over(b, number) for number in numbers)
            for v in range(2):
                place = b.add(row, _I64(4 * LANES * v))
                part = b.fmul(whole_sum(b, own, v), scale)
                total = fused(b, part, scales[v], load(b, place, FLOATS, 4))
                total = fused(b, whole, minima[v], total) if minima else total
                b.store(total, b.inttoptr(place, FLOATS.as_pointer()), align=4)
            return [
                b.add(own, _I64(CACHE_LINE)),
                b.add(factor, apart),
                b.add(row, _I64(4 * PANEL)),
            ]

        loop(b, num_rows, [sums, factors, out], body)
        return context.get_dummy_value()

    def typed(typing: Any, of: Any, head: Any, out: Any, num_rows: Any) -> Any:
        return types.void(of, *[types.int64] * 3), emit

    return intrinsic(typed)


def multiply_groups(name: str, bits: int, has_minimum: bool) -> Any:
    """Make a function for AMX that computes the same as `multiply` in groups.py.

    The rows x are in the byte order that `amx_int8.split` writes.
    """
    head, lay_out, add = PANEL * 2 * (1 + has_minimum), by_fours(bits), _add_group(has_minimum)

    @compiled_as(name)
    def multiply(w: Any, x: Any, scales: Any, num_rows: int, out: Any, after: Any) -> None:
        num_groups, group_bytes = w.shape
        size = (group_bytes - head) * 8 // (bits * PANEL)
        tile_bytes = size * LANES
        room = empty_rows(num_groups, tile_bytes, np.uint16)  # [groups, numbers of two tiles]
        sums, table = empty_rows(4 * TILE, LANES, np.float32), np.zeros(64, np.uint8)
        panel, tiles, own = place_of(w), place_of(room), place_of(sums)
        for group in range(num_groups):
            lines, target = panel + group * group_bytes + head, tiles + group * 2 * tile_bytes
            lay_out(lines, target, size // 4, tile_bytes)
        num_tiles = (num_rows + TILE - 1) // TILE
        share = max(group_bytes // (num_tiles * CACHE_LINE), 1)
        there, configured = place_of(after), 0
        for first in range(0, num_rows, TILE):
            rows = min(num_rows - first, TILE)
            if rows != configured:
                configured = rows
                _configure(table, rows, size)
            row, target = place_of(x[first:]), place_of(out[first:])
            factors = place_of(scales[first:])
            for group in range(num_groups):
                planes = row + group * size, 2 * x.shape[1], num_groups * size
                sum_group(planes, tiles + group * 2 * tile_bytes, tile_bytes, 1, own)
                of = own, factors + 8 * group, 8 * num_groups
                add(of, panel + group * group_bytes, target, rows)
                fetch_lines(there, share)
                there += share * CACHE_LINE
        release()

    return multiply
