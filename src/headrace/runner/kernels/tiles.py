"""Owns the inner loops that need explicit vectors: products and weighted sums.

Left to itself the compiler uses half of a wide register and never fetches ahead, which costs a
third of the memory's speed. A vector holds 16 numbers: one register with AVX-512; elsewhere the
compiler splits it.

A step is 32 stored numbers in the order they lie in memory. They widen to two vectors, `even` and
`odd`: bfloat16 by a shift and by a mask of the words that hold two neighbours, float32 as the
first and the second half of the step. What they meet must lie in that order: see `in_order`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from headrace.runner.kernels.numeric import widen

STEP = 32
PANEL = 32  # outputs whose weights lie side by side
LANES = 16
_CACHE_LINE = 64
_F32, _I32, _I64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_FLOATS, _INTS = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)
_FAST = ("nsz", "arcp", "contract", "afn", "reassoc")
_KINDS = {types.uint16: "bf16", types.int8: "int8", types.int16: "int16", types.float32: "float"}
_SIZES = {"bf16": 2, "float": 4}
Pair = tuple[Any, Any]


@njit(inline="always")
def place(i: int) -> int:
    """Where number i of stored bfloat16 lies among the floats of the steps' two vectors."""
    return i // STEP * STEP + i % 2 * LANES + i % STEP // 2


@njit
def in_order(x: Any, is_bf16: bool) -> Any:
    """x [rows, multiple of STEP] as float32, the numbers of each step as its two vectors."""
    wide = np.empty(x.shape, np.float32)
    apart, second = (2, 1) if is_bf16 else (1, LANES)
    for m in range(x.shape[0]):
        for first in range(0, x.shape[1], STEP):
            here, there = x[m, first : first + STEP], wide[m, first : first + STEP]
            for i in range(LANES):
                there[i] = widen(here[i * apart])
                there[LANES + i] = widen(here[i * apart + second])
    return wide


def load(builder: Any, address: Any, kind: Any, align: int) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)


def _widened(builder: Any, address: Any, kind: str) -> Pair:
    """The two float vectors of the step at `address`."""
    if kind == "bf16":
        words = load(builder, address, _INTS, 2)
        even = builder.shl(words, words.type([16] * LANES))
        odd = builder.and_(words, words.type([0xFFFF0000] * LANES))
        return builder.bitcast(even, _FLOATS), builder.bitcast(odd, _FLOATS)
    second = builder.add(address, _I64(LANES * _SIZES[kind]))
    return load(builder, address, _FLOATS, 4), load(builder, second, _FLOATS, 4)


def _add_product(builder: Any, total: Any, a: Any, b: Any) -> Any:
    return builder.fadd(total, builder.fmul(a, b, flags=_FAST), flags=_FAST)


def _sums_of(builder: Any, vectors: list[Any]) -> Any:
    """One vector of the sums of up to 16, each over its own numbers; the rest of it is zero.

    Neighbours are folded into one until one is left: 15 additions, where each sum alone takes 4.
    """
    folded = vectors + [ir.Constant(_FLOATS, [0.0] * LANES)] * (LANES - len(vectors))
    apart = 1
    while len(folded) > 1:
        pairs = zip(folded[::2], folded[1::2], strict=True)
        folded = [_fold(builder, left, right, apart) for left, right in pairs]
        apart *= 2
    return folded[0]


def _fold(builder: Any, left: Any, right: Any, apart: int) -> Any:
    """Lanes without the bit `apart`: sums of left's lanes that differ in it; with it: right's."""
    near = [i + (LANES - apart if i & apart else 0) for i in range(LANES)]
    far = [i + (LANES if i & apart else apart) for i in range(LANES)]
    parts = [picked(builder, left, right, lanes) for lanes in (near, far)]
    return builder.fadd(*parts, flags=_FAST)


def picked(builder: Any, left: Any, right: Any, lanes: Sequence[int]) -> Any:
    """A vector of numbers of left (from 0) and right (from 16)."""
    kind = ir.VectorType(_I32, len(lanes))
    return builder.shuffle_vector(left, right, ir.Constant(kind, list(lanes)))


def fetch(builder: Any, address: Any) -> None:
    """Asks for a cache line that will be read soon."""
    pointer = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(function, [builder.inttoptr(address, pointer), _I32(0), _I32(2), _I32(1)])


def _loop(
    builder: Any, count: Any, begin: list[Any], body: Callable[[Any, list[Any]], list[Any]]
) -> list[Any]:
    """`body` of a counter and the values so far gives the next values; count is at least 1."""
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
    """An array argument: addresses of its rows, of its elements, and how its numbers are stored."""

    def __init__(self, context: Any, builder: Any, kind: Any, value: Any) -> None:
        array = context.make_array(kind)(context, builder, value)
        self._builder = builder
        self._base = builder.ptrtoint(array.data, _I64)
        self.down, self._right = cgutils.unpack_tuple(builder, array.strides)
        self.shape = cgutils.unpack_tuple(builder, array.shape)
        self.kind = _KINDS[kind.dtype]

    def row(self, first: Any, number: int) -> Any:
        return self.at(self._builder.add(first, _I64(number)), _I64(0))

    def at(self, row: Any, column: Any) -> Any:
        b = self._builder
        return b.add(self._base, b.add(b.mul(row, self.down), b.mul(column, self._right)))


def dot_tile(num_outputs: int, num_rows: int) -> Any:
    """tile(w, x, out, (n, m, column), ahead): out[m + j, column + i] = w[n + i] times x[m + j].

    At most 16 products, no remainders of a step; a row of out is contiguous.

    w [outputs, inputs] is stored bfloat16 bits or float32; x [rows, inputs] float32 in the
    order of the tiles; `ahead` is how many bytes after a line of w another one is fetched. (Places
    are numbers, not slices: making slices takes longer than a tile.)
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        w, x, out = (Matrix(context, builder, signature.args[i], args[i]) for i in range(3))
        first_line, first_row, column = cgutils.unpack_tuple(builder, args[3])
        lines = [w.row(first_line, n) for n in range(num_outputs)]
        rows = [x.row(first_row, m) for m in range(num_rows)]
        steps = builder.sdiv(w.shape[1], _I64(STEP))

        def body(at: Any, totals: list[Any]) -> list[Any]:
            here = builder.mul(at, _I64(STEP * _SIZES[w.kind]))
            there = builder.mul(at, _I64(STEP * _SIZES[x.kind]))
            sides = [_widened(builder, builder.add(row, there), x.kind) for row in rows]
            following = []
            for n, line in enumerate(lines):
                address = builder.add(line, here)
                even, odd = _widened(builder, address, w.kind)
                fetch(builder, builder.add(address, args[4]))
                for m, (left, right) in enumerate(sides):
                    total = _add_product(builder, totals[n * num_rows + m], even, left)
                    following.append(_add_product(builder, total, odd, right))
            return following

        begin = [ir.Constant(_FLOATS, [0.0] * LANES)] * (num_outputs * num_rows)
        totals = _loop(builder, steps, begin, body)
        by_row = [total for m in range(num_rows) for total in totals[m::num_rows]]
        sums = _sums_of(builder, by_row)
        for m in range(num_rows):
            lanes = [m * num_outputs + n for n in range(num_outputs)]
            row = picked(builder, sums, sums, lanes)
            place = out.at(builder.add(first_row, _I64(m)), column)
            builder.store(row, builder.inttoptr(place, row.type.as_pointer()), align=4)
        return context.get_dummy_value()

    def typed(typing: Any, w: Any, x: Any, out: Any, places: Any, ahead: Any) -> Any:
        return types.void(w, x, out, places, types.int64), emit

    return intrinsic(typed)


def mix_tile(num_rows: int, num_steps: int) -> Any:
    """tile(values, weights, acc, (column, m), ahead): so many steps of columns, for num_rows rows.

    acc[m + j, steps] += the sum over i of weights[m + j, i] times values[i, steps], one i at least;
    `column` begins the first step, `ahead` is as for dot_tile; acc is float32 in the order of the
    tiles.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        matrices = [Matrix(context, builder, signature.args[i], args[i]) for i in range(3)]
        (values, weights, acc), places = matrices, cgutils.unpack_tuple(builder, args[3])
        columns = [builder.add(places[0], _I64(STEP * step)) for step in range(num_steps)]
        numbers = [builder.add(places[1], _I64(j)) for j in range(num_rows)]

        def body(at: Any, totals: list[Any]) -> list[Any]:
            vectors: list[Any] = []
            for column in columns:
                address = values.at(at, column)
                vectors += _widened(builder, address, values.kind)
                fetch(builder, builder.add(address, args[4]))
            loads = [load(builder, weights.at(number, at), _F32, 4) for number in numbers]
            factors = [_spread(builder, load) for load in loads for _ in vectors]
            terms = zip(totals, vectors * num_rows, factors, strict=True)
            return [_add_product(builder, *term) for term in terms]

        sums = [acc.at(number, column) for number in numbers for column in columns]
        begin = [side for address in sums for side in _widened(builder, address, acc.kind)]
        for i, total in enumerate(_loop(builder, values.shape[0], begin, body)):
            address = builder.add(sums[i // 2], _I64(i % 2 * LANES * 4))
            builder.store(total, builder.inttoptr(address, _FLOATS.as_pointer()), align=4)
        return context.get_dummy_value()

    def typed(typing: Any, values: Any, weights: Any, acc: Any, places: Any, ahead: Any) -> Any:
        return types.void(values, weights, acc, places, types.int64), emit

    return intrinsic(typed)


def panel_tile(num_rows: int) -> Any:
    """tile(w, x, scales, out, (first, count, group, base, apart)): adds the products of some lines.

    w [lines, 2 * PANEL] is a panel of PANEL outputs; a line is two inputs, side by side for each
    output. x [rows, inputs or more]; out [num_rows, PANEL] is float32 and contiguous.

    Of bfloat16 bits and float32: out[j, n] += the sum over inputs k of lines [first, first + count)
    of w's [k, n] times x[j, k]. Of int8 and int16: that sum, less than 2^31, times
    scales[j, group]. With line i as much is fetched from base + i * apart bytes on.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        w, x, scales, out = (Matrix(context, builder, signature.args[i], args[i]) for i in range(4))
        first, count, group, base, apart = cgutils.unpack_tuple(builder, args[4])
        rows = [x.row(_I64(0), m) for m in range(num_rows)]

        def body(at: Any, totals: list[Any]) -> list[Any]:
            number = builder.add(first, at)
            terms = _terms_of(builder, w.at(number, _I64(0)), w.kind)
            there = builder.add(base, builder.mul(at, apart))
            for k in range(len(terms)):
                fetch(builder, builder.add(there, _I64(k * _CACHE_LINE)))
            following = []
            for m, row in enumerate(rows):
                address = builder.add(row, builder.mul(number, _I64(4 * len(terms))))
                sums = totals[2 * m : 2 * m + 2]
                for k, vectors in enumerate(terms):
                    kind = _F32 if w.kind == "bf16" else _I32  # of int16, two
                    factor = load(builder, builder.add(address, _I64(4 * k)), kind, 2)
                    by, both = _spread(builder, factor), zip(sums, vectors, strict=True)
                    sums = [_add_term(builder, total, vector, by) for total, vector in both]
                following += sums
            return following

        places = [out.at(_I64(m), _I64(LANES * v)) for m in range(num_rows) for v in range(2)]
        begin = [load(builder, place, _FLOATS, 4) for place in places]
        if w.kind == "int8":
            zeros = [ir.Constant(_INTS, [0] * LANES)] * len(places)
            totals = _loop(builder, count, zeros, body)
            factors = [load(builder, scales.at(_I64(m), group), _F32, 4) for m in range(num_rows)]
            parts = [builder.sitofp(total, _FLOATS) for total in totals]
            by = [_spread(builder, factor) for factor in factors for _ in range(2)]
            totals = [_add_product(builder, *term) for term in zip(begin, parts, by, strict=True)]
        else:
            totals = _loop(builder, count, begin, body)
        for place, total in zip(places, totals, strict=True):
            builder.store(total, builder.inttoptr(place, _FLOATS.as_pointer()), align=4)
        return context.get_dummy_value()

    def typed(typing: Any, w: Any, x: Any, scales: Any, out: Any, places: Any) -> Any:
        return types.void(w, x, scales, out, places), emit

    return intrinsic(typed)


def _terms_of(builder: Any, address: Any, kind: str) -> list[Pair]:
    """The line's weights, each pair of vectors those of all outputs for one number of x's.

    bfloat16: floats, input by input. int8: int16, both inputs at once.
    """
    if kind == "bf16":
        second = builder.add(address, _I64(_CACHE_LINE))
        halves = _widened(builder, address, kind), _widened(builder, second, kind)
        return list(zip(*halves, strict=True))
    stored, wide = ir.VectorType(ir.IntType(8), STEP), ir.VectorType(ir.IntType(16), STEP)
    parts = [load(builder, builder.add(address, _I64(size)), stored, 1) for size in (0, STEP)]
    return [(builder.sext(parts[0], wide), builder.sext(parts[1], wide))]


def _add_term(builder: Any, total: Any, a: Any, b: Any) -> Any:
    """Floats: total + a b. int16 as two in each of b's words: a[2i] b[2i] + a[2i + 1] b[2i + 1]."""
    if total.type == _FLOATS:
        return _add_product(builder, total, a, b)
    wide = ir.VectorType(_I32, STEP)
    left, right = builder.sext(a, wide), builder.sext(builder.bitcast(b, a.type), wide)
    products = builder.mul(left, right)
    even, odd = (picked(builder, products, products, range(k, STEP, 2)) for k in (0, 1))
    return builder.add(total, builder.add(even, odd))


def _spread(builder: Any, number: Any) -> Any:
    """A vector of the same number everywhere."""
    vector = ir.VectorType(number.type, LANES)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), number, _I32(0))
    return picked(builder, first, first, [0] * LANES)
