"""Owns the products of rows with a panel of weights in groups, by explicit vectors as in tiles.py.

Within a group all is whole numbers; a group's sums are scaled and added to the totals at its end.
"""

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from headrace_kernels.tiles import (
    CACHE_LINE,
    FLOATS,
    INTS,
    PANEL,
    SHORTS,
    Matrix,
    add_products,
    fetch,
    fused,
    halves,
    load,
    loop,
    panel_sums,
    spread_over,
)

_I64 = ir.IntType(64)


def group_tile(num_rows: int, bits: int, has_minimum: bool) -> Any:
    """tile(w, x, by, out, (num_lines, base, share)): products of whole rows with a panel in groups.

    w [groups, bytes] is a panel of PANEL outputs, its groups as `kernels/groups.py` lays them out:
    scales, minima if there are any, and `num_lines` lines of two inputs, in 4 or 8 bits. x [rows,
    inputs or more] is int16; by [rows, 2 * groups] float32: for each group of a row the scale of
    its inputs, and their sum. out[j, n] = the sum over groups of by's scale times w's times the
    exact sum of products, plus by's sum times w's minimum. With each group `share` bytes, at most
    a group's, are fetched from base + group * share on. Nothing depends on num_rows: no sum is
    reordered.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kinds = signature.args
        w, x, by, out = (Matrix(context, builder, kinds[i], args[i]) for i in range(4))
        places = cgutils.unpack_tuple(builder, args[4])
        rows, factors = ([part.row(_I64(0), m) for m in range(num_rows)] for part in (x, by))
        panel = _GroupedPanel(builder, w, bits, has_minimum, places)
        sums = panel_sums(builder, out, num_rows)

        def add_group(group: Any, totals: list[Any]) -> list[Any]:
            exact = panel.exact_sums(group, rows, sums.int_zeros)
            return panel.scaled(group, exact, factors, totals)  # totals wait in memory meanwhile

        sums.store(loop(builder, w.shape[0], sums.zeros, add_group))
        return context.get_dummy_value()

    def typed(typing: Any, w: Any, x: Any, by: Any, out: Any, places: Any) -> Any:
        return types.void(w, x, by, out, places), emit

    return intrinsic(typed)


class _GroupedPanel:
    """The weights of group_tile: of each group its scales, its minima if any, and its lines."""

    def __init__(
        self, builder: Any, w: Matrix, bits: int, has_minimum: bool, places: list[Any]
    ) -> None:
        self._builder, self._w, self._bits, self._has_minimum = builder, w, bits, has_minimum
        self._num_lines, self._base, self._share = places
        self._num_heads = 2 if has_minimum else 1
        self._apart = _apart(builder, self._share, self._num_lines)

    def exact_sums(self, group: Any, rows: list[Any], zeros: list[Any]) -> list[Any]:
        """A group's sums of products with each row, whole numbers; fetches the group's share."""
        b, num_lines = self._builder, self._num_lines
        lines = b.add(self._w.at(group, _I64(0)), _I64(self._num_heads * 2 * PANEL))
        first, there = b.mul(group, num_lines), b.add(self._base, b.mul(group, self._share))
        rest = b.add(there, b.mul(num_lines, self._apart))
        for head in range(self._num_heads if self._bits == 8 else 0):
            fetch(b, b.add(rest, _I64(head * CACHE_LINE)))

        def add_line(at: Any, sums: list[Any]) -> list[Any]:
            fetch(b, b.add(there, b.mul(at, self._apart)))
            line = b.add(lines, b.mul(at, _I64(self._bits * PANEL // 4)))
            number = b.mul(b.add(first, at), _I64(4))
            places = [b.add(row, number) for row in rows]
            return add_products(b, sums, [_of_line(b, line, self._bits)], places, INTS.element)

        return loop(b, num_lines, zeros, add_line)

    def scaled(
        self, group: Any, sums: list[Any], factors: list[Any], totals: list[Any]
    ) -> list[Any]:
        """Totals with a group's sums; factors: where those of each row lie, two for each group."""
        b, head, following = self._builder, self._w.at(group, _I64(0)), []
        scales = halves(b, head)
        minima = halves(b, b.add(head, _I64(2 * PANEL))) if self._has_minimum else []
        for m, row in enumerate(factors):
            place = b.add(row, b.mul(group, _I64(8)))
            both = [load(b, b.add(place, _I64(n)), FLOATS.element, 4) for n in (0, 4)]
            scale, whole = (spread_over(b, factor) for factor in both)
            for v in range(2):
                part = b.fmul(b.sitofp(sums[2 * m + v], FLOATS), scale)
                total = fused(b, part, scales[v], totals[2 * m + v])
                following.append(fused(b, whole, minima[v], total) if minima else total)
        return following


def _apart(builder: Any, share: Any, num_lines: Any) -> Any:
    """Bytes that a line asks for, at most 64: none of the cache's lines may be left out."""
    bytes_each = builder.sdiv(builder.add(share, builder.sub(num_lines, _I64(1))), num_lines)
    is_more = builder.icmp_signed(">", bytes_each, _I64(CACHE_LINE))
    return builder.select(is_more, _I64(CACHE_LINE), bytes_each)


def _of_line(builder: Any, address: Any, bits: int) -> list[Any]:
    """A line as two vectors of int16: a byte of 4 bits holds one of each, the lower one first."""
    stored, wide = ir.VectorType(ir.IntType(8), SHORTS), ir.VectorType(ir.IntType(16), SHORTS)
    if bits == 8:
        places = [builder.add(address, _I64(SHORTS * v)) for v in range(2)]
        return [builder.sext(load(builder, place, stored, 1), wide) for place in places]
    both = builder.zext(load(builder, address, stored, 1), wide)
    return [builder.and_(both, wide([15] * SHORTS)), builder.lshr(both, wide([4] * SHORTS))]
