"""Emits silu, gelu and the convolution before silu, in explicit vectors as in tiles.py.

Each activation is x / (1 + e^-y). For silu, y = x. For gelu in its tanh approximation, y = 2
sqrt(2/pi) (x + 0.044715 x^3). For the activation of gpt-oss, y = 1.702 x, and x is at most 7.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from headrace_kernels.softmax import LOG2_E, power_of_two
from headrace_kernels.tiles import FLOATS, LANES, Matrix, add_product, fused, load, loop

_I64 = ir.IntType(64)
_GELU = 2 * math.sqrt(2 / math.pi)
STEEPNESS, LIMIT = 1.702, 7.0


def _all(number: float) -> Any:
    return ir.Constant(FLOATS, [number] * LANES)


def _silu(builder: Any, x: Any) -> Any:
    return _times_sigmoid(builder, x, x)


def _gelu(builder: Any, x: Any) -> Any:
    b = builder
    growth = add_product(b, _all(_GELU), b.fmul(_all(_GELU * 0.044715), x), x)
    return _times_sigmoid(b, x, b.fmul(growth, x))


def _clamped(builder: Any, x: Any) -> Any:
    b = builder
    x = b.select(b.fcmp_unordered(">", x, _all(LIMIT)), _all(LIMIT), x)
    return _times_sigmoid(b, x, b.fmul(_all(STEEPNESS), x))


def _times_sigmoid(builder: Any, x: Any, y: Any) -> Any:
    """Return x times the sigmoid of y. The exponential is of -|y|, which cannot overflow."""
    b = builder
    is_negative = b.fcmp_ordered("<", y, _all(0.0))
    down = b.select(is_negative, y, b.fneg(y))
    power = power_of_two(b, b.fmul(down, _all(LOG2_E)))
    top = b.select(is_negative, power, _all(1.0))
    return b.fdiv(b.fmul(x, top), b.fadd(_all(1.0), power))


def _in_place(function: Callable[[Any, Any], Any]) -> Any:
    def typed(typing_context: Any, x: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            row = Matrix(context, builder, signature.args[0], args[0])

            def body(at: Any, values: list[Any]) -> list[Any]:
                place = builder.add(row.base, builder.mul(at, _I64(4 * LANES)))
                vector = function(builder, load(builder, place, FLOATS, 4))
                builder.store(vector, builder.inttoptr(place, FLOATS.as_pointer()), align=4)
                return []

            loop(builder, builder.udiv(row.shape[0], _I64(LANES)), [], body)
            return context.get_dummy_value()

        return types.void(x), emit

    return intrinsic(typed)


silu_row, gelu_row, clamped_row = _in_place(_silu), _in_place(_gelu), _in_place(_clamped)
"""silu_row(x), gelu_row(x), clamped_row(x): apply the named activation to x in place.

x is contiguous float32. The length of x is a positive multiple of the vector size.
"""


def _emit_convolve_row(
    typing_context: Any, weight: Any, inputs: Any, first: Any, out: Any, at: Any
) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        b = builder
        weights, rows, target = (Matrix(context, b, signature.args[i], args[i]) for i in (0, 1, 3))
        row, column = cgutils.unpack_tuple(b, args[4])
        begin, width = target.at(row, column), weights.shape[0]

        def body(at: Any, values: list[Any]) -> list[Any]:
            across = b.mul(at, _I64(LANES))

            def add(number: Any, sums: list[Any]) -> list[Any]:
                place = b.add(args[2], number)
                is_over = b.icmp_signed(">=", place, width)
                place = b.select(is_over, b.sub(place, width), place)
                pair = weights.at(number, across), rows.at(place, across)
                weight, value = (load(b, address, FLOATS, 4) for address in pair)
                return [fused(b, weight, value, sums[0])]

            (total,) = loop(b, width, [_all(0.0)], add)
            place = b.inttoptr(b.add(begin, b.mul(across, _I64(4))), FLOATS.as_pointer())
            b.store(_silu(b, total), place, align=4)
            return []

        loop(b, b.udiv(weights.shape[1], _I64(LANES)), [], body)
        return context.get_dummy_value()

    return types.void(weight, inputs, first, out, at), emit


convolve_row: Any = intrinsic(_emit_convolve_row)
"""convolve_row(weight, inputs, first, out, (row, column)): writes silu of a convolution.

From `column` on, out[row] receives silu of the sum over j of weight[j] * inputs[(first + j) %
width]. weight, inputs: float32 [width, whole vectors], contiguous. out: float32 with two
dimensions.
"""


@njit
def whole(size: Any) -> Any:
    """Round the size up to whole vectors."""
    return (size + LANES - 1) // LANES * LANES


@njit
def row_for(size: int) -> Any:
    """Return zeros for `size` numbers, with a length that `silu_row` accepts."""
    return np.zeros(whole(size), np.float32)
