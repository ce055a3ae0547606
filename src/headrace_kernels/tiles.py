"""Emits the inner loops that need explicit vectors: products of rows with numbers stored in words.

Without explicit vectors, the compiler uses half of a wide register and never prefetches, which
costs a third of the memory bandwidth. A vector holds 16 words of 4 bytes. With AVX-512, a vector
is one register; otherwise the compiler splits the vector. If rows are float32, the two bfloat16
numbers of a word are widened to two vectors of floats, by a shift and by a mask. If rows are
bfloat16 too, one instruction (AVX512-BF16) multiplies both numbers of each word and adds the
products to the sums.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from headrace_kernels.numeric import compiled_as
from headrace_kernels.registers import HAS_512, MAX_TILE_ROWS

SHORTS = 32  # number of int16 numbers in a vector
PANEL = 32  # number of outputs whose weights are stored side by side
LANES = 16
CACHE_LINE = 64  # bytes
_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
FLOATS, INTS = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)
# Two sums for each output, in products of bytes.
SHORT_SUMS = ir.VectorType(ir.IntType(16), 2 * LANES)
_FAST = ("nsz", "arcp", "contract", "afn", "reassoc")
_KINDS = {
    types.uint16: "bf16",
    types.int8: "int8",
    types.int16: "int16",
    types.int64: "int64",
    types.float32: "float",
}


class _BFloat(ir.Type):
    """The type bfloat16, which llvmlite does not have."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


_PAIRS = ir.VectorType(_BFloat(), SHORTS)


@njit
def empty_rows(num_rows: int, num_columns: int, dtype: Any) -> Any:
    """Return a new array that starts at a cache line.

    A load across two cache lines takes twice as long.
    """
    room = np.empty(num_rows * num_columns + CACHE_LINE // 2, dtype)
    first = -np.int64(room.ctypes.data) % CACHE_LINE // room.itemsize
    return room[first : first + num_rows * num_columns].reshape((num_rows, num_columns))


def load(builder: Any, address: Any, kind: Any, align: int) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)


def _widened(builder: Any, address: Any, kind: str, by: str = "float") -> list[Any]:
    """Load 16 words as vectors of floats, one vector for each number of a word.

    If the rows are bfloat16 pairs too, the words are returned unchanged.
    """
    if kind == "float":
        return [load(builder, address, FLOATS, 4)]
    words = load(builder, address, INTS, 2)
    if by == "bf16":
        return [words]
    even = builder.shl(words, words.type([16] * LANES))
    odd = builder.and_(words, words.type([0xFFFF0000] * LANES))
    return [builder.bitcast(even, FLOATS), builder.bitcast(odd, FLOATS)]


def add_product(builder: Any, total: Any, a: Any, b: Any) -> Any:
    return builder.fadd(total, builder.fmul(a, b, flags=_FAST), flags=_FAST)


def _add_pairs(builder: Any, total: Any, words: Any, by: Any) -> Any:
    """Return total + a * b, summed over both numbers of each word."""
    kind = ir.FunctionType(FLOATS, [FLOATS, _PAIRS, _PAIRS])
    name = "llvm.x86.avx512bf16.dpbf16ps.512"
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    pairs = [builder.bitcast(factor, _PAIRS) for factor in (words, by)]
    return builder.call(function, [total, *pairs])


def picked(builder: Any, left: Any, right: Any, lanes: Sequence[int]) -> Any:
    """Return a vector of the chosen lanes.

    The lanes of `left` are numbered from 0. The numbers of the lanes of `right` follow.
    """
    kind = ir.VectorType(_I32, len(lanes))
    return builder.shuffle_vector(left, right, ir.Constant(kind, list(lanes)))


def fetch(builder: Any, address: Any) -> None:
    """Prefetch a cache line that will be read soon."""
    pointer = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [builder.inttoptr(address, pointer), _I32(0), _I32(2), _I32(1)])


def loop(
    builder: Any, count: Any, begin: list[Any], body: Callable[[Any, list[Any]], list[Any]]
) -> list[Any]:
    """Emit a loop and return the values after the loop. `count` must be at least 1.

    body: receives a counter and the current values, and returns the next values.
    """
    before = builder.block
    inside, after = builder.append_basic_block("step"), builder.append_basic_block("done")
    builder.branch(inside)
    builder.position_at_end(inside)
    at = builder.phi(_I64)
    values = [builder.phi(value.type) for value in begin]
    following = [builder.add(at, _I64(1)), *body(at, values)]
    for phi, first, later in zip([at, *values], [_I64(0), *begin], following, strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(later, builder.block)
    builder.cbranch(builder.icmp_signed("<", following[0], count), inside, after)
    builder.position_at_end(after)
    return following[1:]


class Matrix:
    """An array argument: the addresses of rows and elements, and the format of the numbers."""

    def __init__(self, context: Any, builder: Any, kind: Any, value: Any) -> None:
        array = context.make_array(kind)(context, builder, value)
        self._builder = builder
        self.base = builder.ptrtoint(array.data, _I64)
        self._strides = cgutils.unpack_tuple(builder, array.strides)
        self.row_bytes = self._strides[0]
        self.shape = cgutils.unpack_tuple(builder, array.shape)
        self.kind = _KINDS[kind.dtype]
        # The type of one load from a row: a float, or a word of two smaller numbers.
        self.unit = _F32 if self.kind == "float" else _I32

    def row(self, first: Any, number: int) -> Any:
        return self.at(self._builder.add(first, _I64(number)), _I64(0))

    def at(self, row: Any, column: Any) -> Any:
        b, (down, right) = self._builder, self._strides
        return b.add(self.base, b.add(b.mul(row, down), b.mul(column, right)))

    def item(self, number: Any) -> Any:
        """Return a number of a contiguous int64 array."""
        address = self._builder.add(self.base, self._builder.mul(number, _I64(8)))
        return load(self._builder, address, _I64, 8)


class Sums:
    """The sums of a tile, rows x vectors of `out`. Each sum stays in a register during a loop.

    A tile should be as large as the registers allow. Each loaded weight then serves many rows, and
    each number of a row serves many weights. With 32 registers, and bfloat16 pairs that a mask
    widens to two weights, the largest tiles need:

        12 rows x 2 vectors = 24 sums +  4 weights + 1 mask + 1 input = 30
         4 rows x 4 vectors = 16 sums +  8 weights + 1 mask + 1 input = 26
         2 rows x 8 vectors = 16 sums + 16 weights + 1 mask + 1 input = 34, so a few are in memory

    Integers need fewer registers: 12 rows x 2 vectors = 24 sums + 2 weights + 1 input = 27. For
    processors with fewer or shorter registers, see registers.py.
    """

    def __init__(self, builder: Any, out: Matrix, rows: list[Any], columns: list[Any]) -> None:
        self._builder = builder
        self._places = [out.at(row, column) for row in rows for column in columns]
        self.zeros = [ir.Constant(FLOATS, [0.0] * LANES)] * len(self._places)
        self.int_zeros = [ir.Constant(INTS, [0] * LANES)] * len(self._places)

    def load(self) -> list[Any]:
        return [load(self._builder, place, FLOATS, 4) for place in self._places]

    def store(self, totals: list[Any]) -> None:
        for place, total in zip(self._places, totals, strict=True):
            pointer = self._builder.inttoptr(place, FLOATS.as_pointer())
            self._builder.store(total, pointer, align=4)


def panel_sums(builder: Any, out: Matrix, num_rows: int, num_vectors: int, part: Any) -> Sums:
    """Return the sums of the first rows for the outputs of a panel, or of half a panel."""
    first = builder.mul(part, _I64(LANES))
    columns = [builder.add(first, _I64(LANES * v)) for v in range(num_vectors)]
    return Sums(builder, out, [_I64(m) for m in range(num_rows)], columns)


def add_products(
    builder: Any, sums: list[Any], terms: Sequence[Sequence[Any]], places: list[Any], unit: Any
) -> list[Any]:
    """Return the sums of all rows plus the products with the next numbers of each row.

    sums: the sums, row by row.
    terms: the weights of each of the next numbers, one vector for each sum of a row.
    places: the address of each row's numbers, which are loaded as `unit`.
    """
    following, width = [], len(sums) // len(places)
    for m, place in enumerate(places):
        own = sums[m * width : (m + 1) * width]
        for k, weights in enumerate(terms):
            number = load(builder, builder.add(place, _I64(4 * k)), unit, 2)
            spread, both = spread_over(builder, number), zip(own, weights, strict=True)
            own = [_add_term(builder, total, vector, spread) for total, vector in both]
        following += own
    return following


def block_tile(num_rows: int, num_vectors: int) -> Any:
    """Return an intrinsic tile(memory, (lines, columns), x, out, (row, column, more_lines,
    more_columns, adds)).

    The intrinsic multiplies rows of x with words of the memory. A word is stored at the sum of its
    line's offset and its column's offset:

        out[row + m, 16 * (column + v) + n] = sum over lines i and numbers k of a word of
            x[row + m, 2 * i + k]
            times number k of word n at byte lines[i] + columns[column + v] of the memory

    A word is two bfloat16 numbers. In a float32 memory a word is one number, multiplied with
    x[row + m, i]. In an int8 memory a word is four numbers (see `_add_bytes`). If `adds` is true,
    the sum is added to out. The words that are `more_lines` and `more_columns` further on (at least
    0) are prefetched. x is float32, or bfloat16 bits like the memory. out is float32. The rows of x
    and out are contiguous.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        b, of, kinds = builder, cgutils.unpack_tuple(builder, args[1]), signature.args
        lines, columns = (Matrix(context, b, *pair) for pair in zip(kinds[1], of, strict=True))
        memory, x, out = (Matrix(context, b, kinds[i], args[i]) for i in (0, 2, 3))
        row, column, more_lines, more_columns, adds = cgutils.unpack_tuple(b, args[4])
        rows = [x.row(row, m) for m in range(num_rows)]

        def begins(first: Any) -> list[Any]:
            places = [columns.item(b.add(first, _I64(v))) for v in range(num_vectors)]
            return [b.add(memory.base, place) for place in places]

        here, there = begins(column), begins(b.add(column, more_columns))

        def body(at: Any, totals: list[Any]) -> list[Any]:
            line, later = lines.item(at), lines.item(b.add(at, more_lines))
            for begin in there:
                fetch(b, b.add(begin, later))
            if memory.kind == "int8":
                return _add_bytes(b, totals, [b.add(begin, line) for begin in here], rows, at)
            words = [_widened(b, b.add(begin, line), memory.kind, x.kind) for begin in here]
            terms = list(zip(*words, strict=True))
            first = b.mul(at, _I64(4 * len(terms)))
            places = [b.add(row, first) for row in rows]
            return add_products(b, totals, terms, places, x.unit)

        first = b.mul(column, _I64(LANES))
        sums = Sums(
            b,
            out,
            [b.add(row, _I64(m)) for m in range(num_rows)],
            [b.add(first, _I64(LANES * v)) for v in range(num_vectors)],
        )
        both = zip(sums.load(), sums.zeros, strict=True)
        begin = [b.select(adds, vector, none) for vector, none in both]
        sums.store(loop(b, lines.shape[0], begin, body))
        return context.get_dummy_value()

    def typed(typing: Any, memory: Any, where: Any, x: Any, out: Any, at: Any) -> Any:
        return types.void(memory, where, x, out, at), emit

    return intrinsic(typed)


def _add_bytes(
    builder: Any, totals: list[Any], starts: list[Any], rows: list[Any], at: Any
) -> list[Any]:
    """Add the products of four floats of each row with words of four bytes, as in `block_tile`.

    A vector of 16 words has 64 bytes: first number 0 of every word, then number 1 of every word,
    and so on. starts: the address of each vector of words. at: the number of the line. The numbers
    k of all words are used up before the numbers k + 1 are loaded, because 16 registers do not
    hold more.
    """
    kind = ir.VectorType(ir.IntType(8), LANES)
    first = builder.mul(at, _I64(16))
    for k in range(4):
        stored = [load(builder, builder.add(start, _I64(LANES * k)), kind, 1) for start in starts]
        term = [builder.sitofp(builder.sext(each, INTS), FLOATS) for each in stored]
        place = builder.add(first, _I64(4 * k))
        places = [builder.add(row, place) for row in rows]
        totals = add_products(builder, totals, [term], places, _F32)
    return totals


def panel_tile(num_rows: int, num_vectors: int) -> Any:
    """Return an intrinsic tile(w, (x, scales, out), (first, count, group, apart, part, base)).

    The intrinsic adds to out the products of x with `count` lines of a panel, from line `first`
    on. w [lines, 2 * PANEL] is a panel of PANEL outputs. A line is two inputs, side by side for
    each output. x is [rows, inputs or more]; out [num_rows, PANEL] is float32 and contiguous.

    If w is bfloat16 bits, x is float32 or bfloat16 bits, and out[j, n] += the sum over the inputs
    k of these lines of w[k, n] * x[j, k]. If w is int8, x is int16. The sum is then an integer
    below 2^31, which is multiplied with scales[j, group] before the addition.

    While line i is multiplied, the cache lines from base + i * apart on are prefetched, as many
    as a line has. A tile of one vector computes one half of the panel, number `part`; otherwise
    `part` is 0.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        b, kinds = builder, signature.args
        w, of = Matrix(context, b, kinds[0], args[0]), cgutils.unpack_tuple(b, args[1])
        x, scales, out = (Matrix(context, b, *pair) for pair in zip(kinds[1], of, strict=True))
        first, count, group, apart, part, base = cgutils.unpack_tuple(b, args[2])
        rows = [x.row(_I64(0), m) for m in range(num_rows)]
        sums = panel_sums(b, out, num_rows, num_vectors, part)
        is_int8, column = w.kind == "int8", b.mul(part, _I64(PANEL))

        def body(at: Any, totals: list[Any]) -> list[Any]:
            number = b.add(first, at)
            there, line = b.add(base, b.mul(at, apart)), w.at(number, column)
            for k in range(1 if is_int8 else num_vectors):
                fetch(b, b.add(there, _I64(k * CACHE_LINE)))
            terms = _terms_of(b, line, w.kind, x.kind, num_vectors)
            places = [b.add(row, b.mul(number, _I64(4 * len(terms)))) for row in rows]
            if HAS_512 or len(terms) == 1:
                return add_products(b, totals, terms, places, x.unit)
            # No register is free for the weights of the second number until all rows are
            # multiplied with the weights of the first number.
            totals = add_products(b, totals, terms[:1], places, x.unit)
            terms = _terms_of(b, reloaded(b, line), w.kind, x.kind, num_vectors)
            places = [b.add(place, _I64(4)) for place in places]
            return add_products(b, totals, terms[1:], places, x.unit)

        totals = begin = sums.load()
        if is_int8:
            exact = [b.sitofp(total, FLOATS) for total in loop(b, count, sums.int_zeros, body)]
            factors = [load(b, scales.at(_I64(m), group), _F32, 4) for m in range(num_rows)]
            by = [spread_over(b, factor) for factor in factors for _ in range(num_vectors)]
            totals = [add_product(b, *term) for term in zip(begin, exact, by, strict=True)]
        else:
            totals = loop(b, count, begin, body)
        sums.store(totals)
        return context.get_dummy_value()

    def typed(typing: Any, w: Any, rows: Any, span: Any) -> Any:
        return types.void(w, rows, span), emit

    return intrinsic(typed)


def reloaded(builder: Any, address: Any) -> Any:
    """Return the same address, but make the compiler load from it again.

    Otherwise the compiler would keep the loaded values in registers.
    """
    return builder.asm(ir.FunctionType(_I64, [_I64]), "", "=r,0", [address], False)


def over_panel(name: str, tile_of: Callable[[int, int], Any]) -> Any:
    """Return a function take(w, (x, by, out), num_rows, span, (base, share)) for a panel's tiles.

    `take` runs one tile after another. Each tile prefetches the next `share` bytes, from `base` on.
    `take` returns the address after all prefetched bytes. tile_of: makes a tile for a number of
    rows and of vectors, called like the tile of `panel_tile`. span: the arguments of a tile that
    precede `part` and `base`.
    """
    return _over_panel_512(name, tile_of) if HAS_512 else _over_panel_256(name, tile_of)


def _over_panel_512(name: str, tile_of: Callable[[int, int], Any]) -> Any:
    tile_12, tile_8, tile_4 = tile_of(12, 2), tile_of(8, 2), tile_of(4, 2)
    tile_2, tile_1 = tile_of(2, 2), tile_of(1, 2)

    @compiled_as(name, inline="always")
    def take_512(w: Any, rows: Any, num_rows: int, span: Any, after: Any) -> Any:
        (x, by, out), (base, share) = rows, after
        for row in range(0, num_rows, MAX_TILE_ROWS):
            left, own, at = num_rows - row, (x[row:], by[row:], out[row:]), (*span, 0, base)
            if left > 8:
                tile_12(w, own, at)
            elif left > 4:
                tile_8(w, own, at)
            elif left > 2:
                tile_4(w, own, at)
            elif left == 2:
                tile_2(w, own, at)
            else:
                tile_1(w, own, at)
            base += share
        return base

    return take_512


def _over_panel_256(name: str, tile_of: Callable[[int, int], Any]) -> Any:
    take_pair, take_halves = over_pair(name, tile_of), over_halves(name, tile_of, MAX_TILE_ROWS)

    @compiled_as(name, inline="always")
    def take_256(w: Any, rows: Any, num_rows: int, span: Any, after: Any) -> Any:
        if num_rows <= 2:
            return take_pair(w, rows, num_rows, span, after)
        return take_halves(w, rows, num_rows, span, after)

    return take_256


def over_pair(name: str, tile_of: Callable[[int, int], Any]) -> Any:
    """Make `take` as in `over_panel` for processors with short registers, for one or two rows."""
    tile_2, tile_1 = tile_of(2, 2), tile_of(1, 2)

    @compiled_as(name, inline="always")
    def take_pair(w: Any, rows: Any, num_rows: int, span: Any, after: Any) -> Any:
        base, share = after
        if num_rows == 2:
            tile_2(w, rows, (*span, 0, base))
        else:
            tile_1(w, rows, (*span, 0, base))
        return base + share

    return take_pair


def over_halves(name: str, tile_of: Callable[[int, int], Any], most: int) -> Any:
    """Make `take` as in `over_panel` for processors with short registers, for more than two rows.

    `take` computes one half of the panel, then the other half, in tiles of `most` rows or 4.
    """
    tile_most, tile_4 = tile_of(most, 1), tile_of(4, 1)

    @compiled_as(name, inline="always")
    def take_halves(w: Any, rows: Any, num_rows: int, span: Any, after: Any) -> Any:
        (x, by, out), (base, share) = rows, after
        for part in range(PANEL // LANES):
            for row in range(0, num_rows, most):
                own, at = (x[row:], by[row:], out[row:]), (*span, part, base)
                if most > 4 and num_rows - row > 4:
                    tile_most(w, own, at)
                else:
                    tile_4(w, own, at)
                base += share
        return base

    return take_halves


@njit(inline="always")
def num_tiles(num_rows: int) -> int:
    """Return how many tiles `over_panel` runs for a panel."""
    if HAS_512:
        return (num_rows + MAX_TILE_ROWS - 1) // MAX_TILE_ROWS
    return (
        1 if num_rows <= 2 else PANEL // LANES * ((num_rows + MAX_TILE_ROWS - 1) // MAX_TILE_ROWS)
    )


def fused(builder: Any, a: Any, b: Any, total: Any) -> Any:
    """Return total + a * b with a single rounding, however the compiler optimizes the code."""
    kind = ir.FunctionType(FLOATS, [FLOATS] * 3)
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.fma.v16f32")
    return builder.call(function, [a, b, total])


def halves(builder: Any, address: Any) -> list[Any]:
    """Load PANEL float16 numbers as two vectors of floats."""
    kind = ir.VectorType(ir.HalfType(), LANES)
    parts = [load(builder, builder.add(address, _I64(2 * LANES * v)), kind, 2) for v in range(2)]
    return [builder.fpext(part, FLOATS) for part in parts]


def _terms_of(
    builder: Any, address: Any, kind: str, by: str, num_vectors: int
) -> list[tuple[Any, ...]]:
    """Load the weights of a line of a panel: the weights of two inputs, for each output.

    The result has an entry for each load from x, with a vector of weights for each vector of
    outputs. For float32 rows, each of the two inputs is a separate load, and bfloat16 weights
    become floats. For bfloat16 and int16 rows, a single load gets both inputs: bfloat16 weights
    stay pairs, and int8 weights become pairs of int16.
    """
    if kind == "bf16":
        places = [builder.add(address, _I64(CACHE_LINE * v)) for v in range(num_vectors)]
        return list(zip(*(_widened(builder, place, kind, by) for place in places), strict=True))
    stored, wide = ir.VectorType(ir.IntType(8), SHORTS), ir.VectorType(ir.IntType(16), SHORTS)
    places = [builder.add(address, _I64(SHORTS * v)) for v in range(num_vectors)]
    return [tuple(builder.sext(load(builder, place, stored, 1), wide) for place in places)]


def _add_term(builder: Any, total: Any, a: Any, b: Any) -> Any:
    """Return total + a * b; for words, total + a[2i] * b[2i] + a[2i + 1] * b[2i + 1]."""
    if total.type == FLOATS:
        return (add_product if a.type == FLOATS else _add_pairs)(builder, total, a, b)
    if total.type == SHORT_SUMS:
        return builder.add(total, multiply_bytes(builder, a, builder.bitcast(b, a.type)))
    wide = ir.VectorType(_I32, SHORTS)
    left, right = builder.sext(a, wide), builder.sext(builder.bitcast(b, a.type), wide)
    products = builder.mul(left, right)
    even, odd = (picked(builder, products, products, range(k, SHORTS, 2)) for k in (0, 1))
    return builder.add(total, builder.add(even, odd))


def multiply_bytes(builder: Any, a: Any, b: Any) -> Any:
    """Return a[2i] * b[2i] + a[2i + 1] * b[2i + 1] as int16, by AVX2.

    a: 64 unsigned bytes. b: 64 signed bytes. The processor clips a sum to the range of int16.
    """
    half = 2 * LANES
    kind = ir.FunctionType(
        ir.VectorType(ir.IntType(16), half // 2), [ir.VectorType(ir.IntType(8), half)] * 2
    )
    name = "llvm.x86.avx2.pmadd.ub.sw"
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    parts = []
    for first in (0, half):
        lanes = range(first, first + half)
        parts.append(builder.call(function, [picked(builder, x, x, lanes) for x in (a, b)]))
    return picked(builder, parts[0], parts[1], range(half))


def add_neighbours(builder: Any, shorts: Any) -> Any:
    """Return the sums of two neighbouring int16 numbers as INTS, by AVX2."""
    kind = ir.VectorType(ir.IntType(16), LANES)
    name = "llvm.x86.avx2.pmadd.wd"
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(ir.VectorType(_I32, LANES // 2), [kind, kind]), name
    )
    parts = []
    for first in (0, LANES):
        own = picked(builder, shorts, shorts, range(first, first + LANES))
        parts.append(builder.call(function, [own, kind([1] * LANES)]))
    return picked(builder, parts[0], parts[1], range(LANES))


def spread_over(builder: Any, number: Any, size: int = LANES) -> Any:
    """Return a vector with the same number in all lanes."""
    vector = ir.VectorType(number.type, size)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), number, _I32(0))
    return picked(builder, first, first, [0] * size)
