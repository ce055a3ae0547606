"""Emits the products of rows with a panel of grouped weights, in explicit vectors as in tiles.py.

Inside a group all arithmetic is on integers. At the end of a group, its sums are scaled and added
to float32 totals.
"""

from typing import Any, NamedTuple

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from headrace_kernels.fp4 import doubled, half_powers
from headrace_kernels.registers import HAS_512, MULTIPLIES_BYTES
from headrace_kernels.tiles import (
    CACHE_LINE,
    FLOATS,
    INTS,
    PANEL,
    SHORT_SUMS,
    SHORTS,
    Matrix,
    add_neighbours,
    add_products,
    fetch,
    fused,
    halves,
    load,
    loop,
    panel_sums,
    reloaded,
    spread_over,
)

WIDE = 16
"""The number of bits of a weight after `group_layout`, which widens weights once for many tiles."""


class GroupFormat(NamedTuple):
    """The format of a group's weights.

    bits: size of a weight. has_minimum: whether each output has a minimum. is_float: whether the
    weights are MXFP4.
    """

    bits: int
    has_minimum: bool
    is_float: bool = False

    @property
    def head_bytes(self) -> int:
        """Return the bytes of a group's scales and minima, which precede the weights."""
        return PANEL if self.is_float else PANEL * 2 * (1 + self.has_minimum)

    @property
    def has_byte_rows(self) -> bool:
        """Return whether rows become bytes. Otherwise rows become int16."""
        return MULTIPLIES_BYTES and self.bits == 4 and not self.is_float

    @property
    def line_inputs(self) -> int:
        """Return the number of inputs in a line."""
        return 4 if self.has_byte_rows else 2

    @property
    def line_bytes(self) -> int:
        return PANEL * self.line_inputs * self.bits // 8

    @property
    def name(self) -> str:
        kind = "_and_minimum" if self.has_minimum else "_float" if self.is_float else ""
        return f"groups_{self.bits}{kind}"


_I64 = ir.IntType(64)
# A vector for a line of 4-bit weights.
_WORDS = ir.VectorType(ir.IntType(32), SHORTS // 4)


def group_tile(num_rows: int, num_vectors: int, form: GroupFormat) -> Any:
    """Return an intrinsic tile(w, (x, by, out), (first, count, num_lines, share, part, base)).

    The intrinsic multiplies x with `count` groups of a panel, from group `first` on, and adds the
    products to out:

        out[j, n] += sum over these groups of
            by's scale * w's scale * (exact sum of the products of x[j] and w)
            + by's sum * w's minimum

    The weights w [groups, bytes] are a panel of PANEL outputs as groups.py packs it. A group is
    its scales, its minima if any, and `num_lines` lines of inputs in 4 or 8 bits. The inputs
    x [rows, inputs or more] are int16, or int8 if `form.has_byte_rows`. For each group of a row,
    `by` [rows, 2 * groups] holds in float32 the scale and the sum of the row's inputs.

    While group i is multiplied, `share` bytes are prefetched from base + i * share on. `share` is
    at most the size of a group. The order of additions is the same for every `num_rows`, so the
    number of rows does not change any bit.

    A tile of one vector computes one half of the panel, number `part`; otherwise `part` is 0.
    If the format has WIDE bits, `group_layout` has written w, and nothing is prefetched.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kinds, of = signature.args, cgutils.unpack_tuple(builder, args[1])
        w = Matrix(context, builder, kinds[0], args[0])
        x, by, out = (Matrix(context, builder, *pair) for pair in zip(kinds[1], of, strict=True))
        first, count, num_lines, share, part, base = cgutils.unpack_tuple(builder, args[2])
        rows, factors = ([part.row(_I64(0), m) for m in range(num_rows)] for part in (x, by))
        if form.bits == WIDE:
            panel: _Panel = _Half(builder, w, form, num_lines, part)
        else:
            half = part if num_vectors == 1 else None
            reader = _PackedBytes if form.has_byte_rows else _Packed
            panel = reader(builder, w, form, (num_lines, share, base), half)
        sums = panel_sums(builder, out, num_rows, num_vectors, part)

        def add_group(at: Any, totals: list[Any]) -> list[Any]:
            group = builder.add(first, at)
            exact = panel.exact_sums(at, group, rows, sums.int_zeros)
            # The totals stay in memory while a group is summed in registers.
            return panel.scaled(group, exact, factors, totals)

        sums.store(loop(builder, count, sums.load(), add_group))
        return context.get_dummy_value()

    def typed(typing: Any, w: Any, rows: Any, span: Any) -> Any:
        return types.void(w, rows, span), emit

    return intrinsic(typed)


def group_layout(form: GroupFormat) -> Any:
    """Return an intrinsic layout(w, room, (group, place, num_lines, share, base)).

    The intrinsic widens a group of w once, so that many tiles can use the result. room[place]
    receives the first half of the outputs and then the second half. A half is its scales in
    float32, its minima if any, and its lines in int16. The scales, the minima and each line take
    one cache line each. As in `group_tile`, `share` bytes from `base` on are prefetched.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        b, kinds = builder, signature.args
        w, room = (Matrix(context, b, kinds[n], args[n]) for n in range(2))
        group, place, num_lines, share, base = cgutils.unpack_tuple(b, args[2])
        panel = _Packed(b, w, form, (num_lines, share, base), None)
        own = [_Half(b, room, form, num_lines, _I64(part)) for part in range(2)]
        for number, both in enumerate(panel.numbers(group)):
            for half, vector in zip(own, both, strict=True):
                _store(b, vector, half.number_at(place, number))

        def put_line(at: Any, _: list[Any]) -> list[Any]:
            panel.fetch_at(_I64(0), at)
            for half, vector in zip(own, panel.weights(group, at), strict=True):
                _store(b, vector, half.line_at(place, at))
            return []

        panel.fetch_heads(_I64(0))
        loop(b, num_lines, [], put_line)
        return context.get_dummy_value()

    def typed(typing: Any, w: Any, room: Any, at: Any) -> Any:
        return types.void(w, room, at), emit

    return intrinsic(typed)


class _Panel:
    """The weights of a panel as `group_tile` reads them: scales, minima if any, and lines."""

    # How many lines one round of the loop adds. Every group has an even number of lines.
    _at_once = 1

    def __init__(self, builder: Any, w: Matrix, form: GroupFormat, num_lines: Any) -> None:
        self._builder, self._w, self._num_lines = builder, w, num_lines
        self._form, self._num_numbers = form, 1 + form.has_minimum

    def numbers(self, group: Any) -> list[list[Any]]:
        """Return vectors of the scales and, if there are minima, vectors of the minima."""
        raise NotImplementedError

    def weights(self, group: Any, line: Any) -> list[Any]:
        """Return a line as vectors of int16."""
        raise NotImplementedError

    def fetch_at(self, at: Any, line: Any) -> None:
        """Prefetch the part of share number `at` that belongs to `line`."""

    def fetch_heads(self, at: Any) -> None:
        """Prefetch what the calls of `fetch_at` leave out of share number `at`."""

    def exact_sums(self, at: Any, group: Any, rows: list[Any], zeros: list[Any]) -> list[Any]:
        """Return the integer sums of a group's products with each row; prefetch share `at`."""
        b, num_lines = self._builder, self._num_lines
        first = b.mul(group, num_lines)
        self.fetch_heads(at)

        def add_line(line: Any, sums: list[Any]) -> list[Any]:
            self.fetch_at(at, line)
            number = b.mul(b.add(first, line), _I64(4))
            places = [b.add(row, number) for row in rows]
            return add_products(b, sums, [self.weights(group, line)], places, INTS.element)

        def add_lines(step: Any, sums: list[Any]) -> list[Any]:
            for line in range(self._at_once):
                sums = add_line(b.add(b.mul(step, _I64(self._at_once)), _I64(line)), sums)
            return sums

        return loop(b, b.udiv(num_lines, _I64(self._at_once)), zeros, add_lines)

    def scaled(
        self, group: Any, sums: list[Any], factors: list[Any], totals: list[Any]
    ) -> list[Any]:
        """Return the totals plus a group's scaled sums.

        factors: addresses of each row's factors, two for each group.
        """
        b, following = self._builder, []
        scales, *minima = self.numbers(group)
        for m, row in enumerate(factors):
            place = b.add(row, b.mul(group, _I64(8)))
            both = [load(b, b.add(place, _I64(n)), FLOATS.element, 4) for n in (0, 4)]
            scale, whole = (spread_over(b, factor) for factor in both)
            for v, own in enumerate(scales):
                n = m * len(scales) + v
                part = b.fmul(b.sitofp(sums[n], FLOATS), scale)
                total = fused(b, part, own, totals[n])
                following.append(fused(b, whole, minima[0][v], total) if minima else total)
        return following


class _Packed(_Panel):
    """Reads weights in the layout in which groups.py packs them.

    half: which half of the outputs to read; None reads both halves.
    """

    _at_once = 1 if HAS_512 else 2
    _fetches_per_line = 1

    def __init__(
        self, builder: Any, w: Matrix, form: GroupFormat, places: tuple[Any, ...], half: Any
    ) -> None:
        num_lines, self._share, self._base = places
        super().__init__(builder, w, form, num_lines)
        self._half = half
        self._num_fetches = builder.mul(num_lines, _I64(self._fetches_per_line))
        self._apart = _apart(builder, self._share, self._num_fetches)

    def numbers(self, group: Any) -> list[list[Any]]:
        b, head, half = self._builder, self._w.at(group, _I64(0)), self._half
        if self._form.is_float:
            place = head if half is None else b.add(head, b.mul(half, _I64(PANEL // 2)))
            return [half_powers(b, place)[: 2 if half is None else 1]]
        places = [b.add(head, _I64(2 * PANEL * n)) for n in range(self._num_numbers)]
        if half is None:
            return [halves(b, place) for place in places]
        return [halves(b, b.add(place, b.mul(half, _I64(PANEL))))[:1] for place in places]

    def weights(self, group: Any, line: Any) -> list[Any]:
        """Return a line as vectors of int16.

        A byte of 4-bit weights holds one weight of each half; the first half is in the lower bits.
        """
        b, half = self._builder, self._half
        lines = b.add(self._w.at(group, _I64(0)), _I64(self._form.head_bytes))
        place = b.add(lines, b.mul(line, _I64(self._form.line_bytes)))
        stored, wide = ir.VectorType(ir.IntType(8), SHORTS), ir.VectorType(ir.IntType(16), SHORTS)
        if self._form.bits == 8:
            begin = place if half is None else b.add(place, b.mul(half, _I64(SHORTS)))
            places = [b.add(begin, _I64(SHORTS * v)) for v in range(2 if half is None else 1)]
            return [b.sext(load(b, own, stored, 1), wide) for own in places]
        if half is None and self._form.is_float:
            both = load(b, place, stored, 1)
            codes = b.and_(both, stored([15] * SHORTS)), b.lshr(both, stored([4] * SHORTS))
            return [b.sext(doubled(b, each), wide) for each in codes]
        if half is None:
            both = b.zext(load(b, place, stored, 1), wide)
            return [b.and_(both, wide([15] * SHORTS)), b.lshr(both, wide([4] * SHORTS))]
        # There are no instructions to shift bytes, so words are shifted and masked.
        words = load(b, place, _WORDS, 1)
        by = b.trunc(b.mul(half, _I64(4)), _WORDS.element)
        shifted = b.lshr(words, spread_over(b, by, _WORDS.count))
        lower = b.and_(shifted, _WORDS([0x0F0F0F0F] * _WORDS.count))
        codes = b.bitcast(lower, stored)
        return [b.sext(doubled(b, codes), wide) if self._form.is_float else b.zext(codes, wide)]

    def fetch_at(self, at: Any, line: Any) -> None:
        b = self._builder
        fetch(b, b.add(self._begin(at), b.mul(line, self._apart)))

    def fetch_heads(self, at: Any) -> None:
        b = self._builder
        rest = b.add(self._begin(at), b.mul(self._num_fetches, self._apart))
        for head in range(self._num_numbers if self._form.bits == 8 else 0):
            fetch(b, b.add(rest, _I64(head * CACHE_LINE)))

    def _begin(self, at: Any) -> Any:
        return self._builder.add(self._base, self._builder.mul(at, self._share))


class _PackedBytes(_Packed):
    """Reads 4-bit weights as unsigned bytes, in lines of four inputs.

    An output has two sums in int16, each of half of the 32 inputs of a group. A sum fits, because
    it is at most 16 * 15 * 127.

    The next panel is prefetched evenly: with bursts, a step of one stream took 6 % longer.
    """

    _fetches_per_line = 2

    def exact_sums(self, at: Any, group: Any, rows: list[Any], zeros: list[Any]) -> list[Any]:
        b = self._builder
        first = b.mul(group, self._num_lines)

        def add_pair(pair: Any, sums: list[Any]) -> list[Any]:
            for odd in range(2):
                line = b.add(b.mul(pair, _I64(2)), _I64(odd))
                for fetch_number in range(2):
                    self.fetch_at(at, b.add(b.mul(line, _I64(2)), _I64(fetch_number)))
                number = b.mul(b.add(first, line), _I64(4))
                places = [b.add(row, number) for row in rows]
                sums = add_products(b, sums, [self._line(group, pair, odd)], places, INTS.element)
            return sums

        none = [ir.Constant(SHORT_SUMS, [0] * SHORT_SUMS.count)] * len(zeros)
        sums = loop(b, b.udiv(self._num_lines, _I64(2)), none, add_pair)
        return [add_neighbours(b, each) for each in sums]

    def _line(self, group: Any, pair: Any, odd: int) -> list[Any]:
        """Return a line as vectors of bytes, each with the four inputs of 16 outputs.

        Two lines share their bytes; the first line is in the lower bits.
        """
        b, half = self._builder, self._half
        lines = b.add(self._w.at(group, _I64(0)), _I64(self._form.head_bytes))
        place = b.add(lines, b.mul(pair, _I64(2 * CACHE_LINE)))
        if half is None:
            places = [b.add(place, _I64(CACHE_LINE * v)) for v in range(2)]
        else:
            places = [b.add(place, b.mul(half, _I64(CACHE_LINE)))]
        stored, mask = ir.VectorType(ir.IntType(8), CACHE_LINE), INTS([0x0F0F0F0F] * INTS.count)
        if odd and half is not None:
            # No register is free for the bytes while all rows are multiplied with the first line.
            places = [reloaded(b, own) for own in places]
        words = [load(b, own, INTS, 1) for own in places]
        shifted = [b.lshr(own, INTS([4] * INTS.count)) if odd else own for own in words]
        return [b.bitcast(b.and_(own, mask), stored) for own in shifted]


class _Half(_Panel):
    """Half of the outputs, in the layout that `group_layout` writes."""

    def __init__(
        self, builder: Any, w: Matrix, form: GroupFormat, num_lines: Any, part: Any
    ) -> None:
        super().__init__(builder, w, form, num_lines)
        own = builder.mul(num_lines, _I64(CACHE_LINE))
        self._column = builder.mul(part, builder.add(own, _I64(self._num_numbers * CACHE_LINE)))

    def numbers(self, group: Any) -> list[list[Any]]:
        b, places = self._builder, range(self._num_numbers)
        return [[load(b, self.number_at(group, n), FLOATS, 4)] for n in places]

    def weights(self, group: Any, line: Any) -> list[Any]:
        wide = ir.VectorType(ir.IntType(16), SHORTS)
        return [load(self._builder, self.line_at(group, line), wide, 4)]

    def number_at(self, group: Any, number: int) -> Any:
        return self._builder.add(self._w.at(group, self._column), _I64(CACHE_LINE * number))

    def line_at(self, group: Any, line: Any) -> Any:
        b = self._builder
        lines = self.number_at(group, self._num_numbers)
        return b.add(lines, b.mul(line, _I64(CACHE_LINE)))


def _store(builder: Any, vector: Any, address: Any) -> None:
    pointer = builder.inttoptr(address, vector.type.as_pointer())
    builder.store(vector, pointer, align=4)


def _apart(builder: Any, share: Any, num_lines: Any) -> Any:
    """Return the distance of two lines' prefetches in bytes: at most 64, to skip no cache line."""
    bytes_each = builder.sdiv(builder.add(share, builder.sub(num_lines, _I64(1))), num_lines)
    is_more = builder.icmp_signed(">", bytes_each, _I64(CACHE_LINE))
    return builder.select(is_more, _I64(CACHE_LINE), bytes_each)
