"""Emits the softmax of attention's scores, in explicit vectors as in tiles.py."""

import math
from collections.abc import Callable
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from headrace_kernels.tiles import (
    FLOATS,
    INTS,
    LANES,
    Matrix,
    add_product,
    loop,
    picked,
    spread_over,
)

# A number below every score, and far from overflow.
LOWEST = -1e30
LOG2_E = 1.4426950408889634
# 2^_LEAST and 2^(_LEAST - 1/2) are normal floats.
_LEAST = -125.0
# The Taylor series of 2^x, from the sixth power down.
_POWERS = [math.log(2) ** k / math.factorial(k) for k in range(6, -1, -1)]
_F32, _I64 = ir.FloatType(), ir.IntType(64)
_SHORTS = ir.VectorType(ir.IntType(16), LANES)


def _all(number: float) -> Any:
    return ir.Constant(FLOATS, [number] * LANES)


def _ints(number: int) -> Any:
    return ir.Constant(INTS, [number] * LANES)


class _Row:
    """The vectors of a row of scores in which only the columns [low, high) are visible."""

    def __init__(self, builder: Any, begin: Any, low: Any, high: Any) -> None:
        self._builder, self._begin = builder, begin
        edges = (builder.trunc(edge, ir.IntType(32)) for edge in (low, high))
        self._low, self._high = (spread_over(builder, edge) for edge in edges)

    def vector(self, at: Any) -> tuple[Any, Any]:
        """Return a vector of scores, and the vector's first column in the row.

        Hidden scores are replaced by LOWEST.
        """
        b = self._builder
        first = b.mul(at, _I64(LANES))
        place = b.inttoptr(b.add(self._begin, b.mul(first, _I64(4))), FLOATS.as_pointer())
        numbers = spread_over(b, b.trunc(first, ir.IntType(32)))
        numbers = b.add(numbers, ir.Constant(INTS, list(range(LANES))))
        above = b.icmp_signed(">=", numbers, self._low)
        is_seen = b.and_(above, b.icmp_signed("<", numbers, self._high))
        return b.select(is_seen, b.load(place, align=4), _all(LOWEST)), first


def _call(builder: Any, name: str, kind: Any, *args: Any) -> Any:
    function = ir.FunctionType(kind, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, function, name), args)


def power_of_two(builder: Any, x: Any) -> Any:
    """Return 2^x for x <= 0 with a relative error below 2e-7; 0 if 2^x is below 2^-125.

    Let x = n + f with |f| <= 1/2. 2^f is computed by its Taylor series, and n is added to the bits
    of the exponent of 2^f.
    """
    b = builder
    is_normal = b.fcmp_ordered(">", x, _all(_LEAST))
    x = b.select(is_normal, x, _all(_LEAST))
    whole = _call(b, "llvm.nearbyint.v16f32", FLOATS, x)
    f = b.fsub(x, whole)
    p = _all(_POWERS[0])
    for power in _POWERS[1:]:
        p = add_product(b, _all(power), p, f)
    n = b.shl(b.fptosi(whole, INTS), _ints(23))
    bits = b.add(b.bitcast(p, INTS), n)
    return b.bitcast(b.select(is_normal, bits, _ints(0)), FLOATS)


def _narrowed(builder: Any, vector: Any) -> Any:
    """Return numbers >= 0 as bfloat16 bits, rounded to the nearest."""
    b = builder
    rounded = b.add(b.bitcast(vector, INTS), _ints(0x8000))
    return b.trunc(b.lshr(rounded, _ints(16)), _SHORTS)


def _folded(builder: Any, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Combine the lanes of a vector in a fixed order.

    First the two halves of the vector are combined, then the two halves of the result, and so on.
    """
    while (size := vector.type.count) > 1:
        halves = (range(0, size // 2), range(size // 2, size))
        vector = combine(*(picked(builder, vector, vector, half) for half in halves))
    return builder.extract_element(vector, ir.IntType(32)(0))


def _largest(builder: Any) -> Callable[[Any, Any], Any]:
    return lambda a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _emit_highest(typing_context: Any, scores: Any, number: Any, visible: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        low, high, count = cgutils.unpack_tuple(builder, args[2])
        source = Matrix(context, builder, signature.args[0], args[0])
        row, larger = _Row(builder, source.at(args[1], _I64(0)), low, high), _largest(builder)

        def body(at: Any, values: list[Any]) -> list[Any]:
            return [larger(values[0], row.vector(at)[0])]

        (top,) = loop(builder, count, [_all(LOWEST)], body)
        return _folded(builder, top, larger)

    return types.float32(scores, types.int64, visible), emit


highest: Any = intrinsic(_emit_highest)
"""highest(scores, row, (low, high, count)): returns the largest score in columns [low, high).

scores: float32 [rows, at least `count` vectors], whose rows are contiguous. Returns LOWEST if no
column is visible.
"""


def _emit_soften(typing_context: Any, scores: Any, number: Any, count: Any, cap: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        b = builder
        begin = Matrix(context, b, signature.args[0], args[0]).at(args[1], _I64(0))
        size = spread_over(b, args[3])
        per_power = b.fdiv(_all(-2 * LOG2_E), size)

        def body(at: Any, values: list[Any]) -> list[Any]:
            place = b.add(begin, b.mul(at, _I64(4 * LANES)))
            pointer = b.inttoptr(place, FLOATS.as_pointer())
            vector = b.load(pointer, align=4)
            is_negative = b.fcmp_ordered("<", vector, _all(0.0))
            power = power_of_two(
                b, b.fmul(b.select(is_negative, b.fneg(vector), vector), per_power)
            )
            share = b.fdiv(b.fsub(_all(1.0), power), b.fadd(_all(1.0), power))
            softened = b.fmul(size, share)
            b.store(b.select(is_negative, b.fneg(softened), softened), pointer, align=4)
            return []

        loop(b, args[2], [], body)
        return context.get_dummy_value()

    return types.void(scores, types.int64, types.int64, types.float32), emit


soften_row: Any = intrinsic(_emit_soften)
"""soften_row(scores, row, count, cap): replaces x in `count` vectors by cap * tanh(x / cap).

For y >= 0, tanh(y) = (1 - e^-2y) / (1 + e^-2y); negative scores take the opposite sign.
"""


def _emit_weigh(
    typing_context: Any, scores: Any, number: Any, visible: Any, by: Any, weights: Any
) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        low, high, count = cgutils.unpack_tuple(builder, args[2])
        scale, top = (spread_over(builder, x) for x in cgutils.unpack_tuple(builder, args[3]))
        source, target = (Matrix(context, builder, signature.args[i], args[i]) for i in (0, 4))
        row = _Row(builder, source.at(args[1], _I64(0)), low, high)
        begin, is_float = target.at(args[1], _I64(0)), target.kind == "float"
        stored, size = (FLOATS, 4) if is_float else (_SHORTS, 2)

        def body(at: Any, values: list[Any]) -> list[Any]:
            vector, first = row.vector(at)
            scaled = builder.fsub(builder.fmul(vector, scale), top, flags=("contract",))
            weight = power_of_two(builder, scaled)
            place = builder.add(begin, builder.mul(first, _I64(size)))
            result = weight if is_float else _narrowed(builder, weight)
            builder.store(result, builder.inttoptr(place, stored.as_pointer()), align=size)
            return [builder.fadd(values[0], weight)]

        (total,) = loop(builder, count, [_all(0.0)], body)
        return _folded(builder, total, builder.fadd)

    return types.float32(scores, types.int64, visible, by, weights), emit


weigh: Any = intrinsic(_emit_weigh)
"""weigh(scores, row, (low, high, count), (scale, top), weights): stores 2^(score * scale - top).

The weights are stored in the same row of `weights`, as float32 or bfloat16 bits, with 0 for
hidden scores. Returns the sum of the weights before rounding.
"""


def _emit_shrink(typing_context: Any, sums: Any, number: Any, count: Any, by: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        begin = Matrix(context, builder, signature.args[0], args[0]).at(args[1], _I64(0))
        factor = spread_over(builder, args[3])

        def body(at: Any, values: list[Any]) -> list[Any]:
            place = builder.add(begin, builder.mul(at, _I64(4 * LANES)))
            pointer = builder.inttoptr(place, FLOATS.as_pointer())
            builder.store(builder.fmul(builder.load(pointer, align=4), factor), pointer, align=4)
            return []

        loop(builder, args[2], [], body)
        return context.get_dummy_value()

    return types.void(sums, types.int64, types.int64, types.float32), emit


shrink_row: Any = intrinsic(_emit_shrink)
"""shrink_row(sums, row, count, by): multiplies `count` vectors of a float32 row with `by`."""
