"""Owns the products of rows with a panel of weights in groups, by explicit vectors as in tiles.py.

Within a group all is whole numbers; a group's sums are scaled and added to the totals at its end.
"""

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from headrace_kernels.registers import HAS_512
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

_LINES = 1 if HAS_512 else 2  # at once; every group has an even number of them
_I64 = ir.IntType(64)
_WORDS = ir.VectorType(ir.IntType(32), SHORTS // 4)  # of a line of 4 bits


def group_tile(num_rows: int, num_vectors: int, bits: int, has_minimum: bool) -> Any:
    """tile(w, (x, by, out), (first, count, num_lines, share, part, base)): adds groups' products.

    w [groups, bytes] is a panel of PANEL outputs, its groups as `kernels/groups.py` lays them out:
    scales, minima if there are any, and `num_lines` lines of two inputs, in 4 or 8 bits. x [rows,
    inputs or more] is int16; by [rows, 2 * groups] float32: for each group of a row the scale of
    its inputs, and their sum. out[j, n] += the sum over groups [first, first + count) of by's scale
    times w's times the exact sum of products, plus by's sum times w's minimum. With group i `share`
    bytes, at most a group's, are fetched from base + i * share on. Nothing depends on
    num_rows: no sum is reordered. A tile of one vector takes half of the panel and of out, that of
    number `part`; else `part` is 0.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kinds, of = signature.args, cgutils.unpack_tuple(builder, args[1])
        w = Matrix(context, builder, kinds[0], args[0])
        x, by, out = (Matrix(context, builder, *pair) for pair in zip(kinds[1], of, strict=True))
        first, count, *places, part, base = cgutils.unpack_tuple(builder, args[2])
        rows, factors = ([part.row(_I64(0), m) for m in range(num_rows)] for part in (x, by))
        half = part if num_vectors == 1 else None
        panel = _GroupedPanel(builder, w, (bits, has_minimum), (*places, base), half)
        sums = panel_sums(builder, out, num_rows, num_vectors, part)

        def add_group(at: Any, totals: list[Any]) -> list[Any]:
            group = builder.add(first, at)
            exact = panel.exact_sums(at, group, rows, sums.int_zeros)
            return panel.scaled(group, exact, factors, totals)  # totals wait in memory meanwhile

        sums.store(loop(builder, count, sums.load(), add_group))
        return context.get_dummy_value()

    def typed(typing: Any, w: Any, rows: Any, span: Any) -> Any:
        return types.void(w, rows, span), emit

    return intrinsic(typed)


class _GroupedPanel:
    """The weights of group_tile: of each group its scales, its minima if any, and its lines.

    `half`: the number of the half that is meant; None: both are.
    """

    def __init__(
        self, builder: Any, w: Matrix, kind: tuple[int, bool], places: tuple[Any, ...], half: Any
    ) -> None:
        self._builder, self._w, self._half = builder, w, half
        self._bits, self._has_minimum = kind
        self._num_lines, self._share, self._base = places
        self._num_heads = 2 if self._has_minimum else 1
        self._apart = _apart(builder, self._share, self._num_lines)

    def exact_sums(self, at: Any, group: Any, rows: list[Any], zeros: list[Any]) -> list[Any]:
        """A group's sums of products with each row, whole numbers; fetches share number `at`."""
        b, num_lines = self._builder, self._num_lines
        lines = b.add(self._w.at(group, _I64(0)), _I64(self._num_heads * 2 * PANEL))
        first, there = b.mul(group, num_lines), b.add(self._base, b.mul(at, self._share))
        rest = b.add(there, b.mul(num_lines, self._apart))
        for head in range(self._num_heads if self._bits == 8 else 0):
            fetch(b, b.add(rest, _I64(head * CACHE_LINE)))

        def add_line(at: Any, sums: list[Any]) -> list[Any]:
            fetch(b, b.add(there, b.mul(at, self._apart)))
            line = b.add(lines, b.mul(at, _I64(self._bits * PANEL // 4)))
            number = b.mul(b.add(first, at), _I64(4))
            places = [b.add(row, number) for row in rows]
            return add_products(b, sums, [self._weights(line)], places, INTS.element)

        def add_lines(at: Any, sums: list[Any]) -> list[Any]:
            for line in range(_LINES):
                sums = add_line(b.add(b.mul(at, _I64(_LINES)), _I64(line)), sums)
            return sums

        return loop(b, b.udiv(num_lines, _I64(_LINES)), zeros, add_lines)

    def scaled(
        self, group: Any, sums: list[Any], factors: list[Any], totals: list[Any]
    ) -> list[Any]:
        """Totals with a group's sums; factors: where those of each row lie, two for each group."""
        b, head, following = self._builder, self._w.at(group, _I64(0)), []
        scales = self._of_outputs(head)
        minima = self._of_outputs(b.add(head, _I64(2 * PANEL))) if self._has_minimum else []
        for m, row in enumerate(factors):
            place = b.add(row, b.mul(group, _I64(8)))
            both = [load(b, b.add(place, _I64(n)), FLOATS.element, 4) for n in (0, 4)]
            scale, whole = (spread_over(b, factor) for factor in both)
            for v, own in enumerate(scales):
                n = m * len(scales) + v
                part = b.fmul(b.sitofp(sums[n], FLOATS), scale)
                total = fused(b, part, own, totals[n])
                following.append(fused(b, whole, minima[v], total) if minima else total)
        return following

    def _of_outputs(self, place: Any) -> list[Any]:
        """A float16 number of each output, as vectors of floats."""
        b, half = self._builder, self._half
        if half is None:
            return halves(b, place)
        return halves(b, b.add(place, b.mul(half, _I64(PANEL))))[:1]

    def _weights(self, line: Any) -> list[Any]:
        """A line as vectors of int16: a byte of 4 bits holds one of each half, the first lower."""
        b, half = self._builder, self._half
        stored, wide = ir.VectorType(ir.IntType(8), SHORTS), ir.VectorType(ir.IntType(16), SHORTS)
        if self._bits == 8:
            begin = line if half is None else b.add(line, b.mul(half, _I64(SHORTS)))
            places = [b.add(begin, _I64(SHORTS * v)) for v in range(2 if half is None else 1)]
            return [b.sext(load(b, place, stored, 1), wide) for place in places]
        if half is None:
            both = b.zext(load(b, line, stored, 1), wide)
            return [b.and_(both, wide([15] * SHORTS)), b.lshr(both, wide([4] * SHORTS))]
        words = load(b, line, _WORDS, 1)  # there is no shift of bytes
        by = b.trunc(b.mul(half, _I64(4)), _WORDS.element)
        shifted = b.lshr(words, spread_over(b, by, _WORDS.count))
        lower = b.and_(shifted, _WORDS([0x0F0F0F0F] * _WORDS.count))
        return [b.zext(b.bitcast(lower, stored), wide)]


def _apart(builder: Any, share: Any, num_lines: Any) -> Any:
    """Bytes that a line asks for, at most 64: none of the cache's lines may be left out."""
    bytes_each = builder.sdiv(builder.add(share, builder.sub(num_lines, _I64(1))), num_lines)
    is_more = builder.icmp_signed(">", bytes_each, _I64(CACHE_LINE))
    return builder.select(is_more, _I64(CACHE_LINE), bytes_each)
