"""Provides what Numba lacks: typed pointers, an atomic counter, bfloat16 and a vectorized exp."""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.extending import intrinsic

FAST = {"nsz", "arcp", "contract", "afn", "reassoc"}
"""Fast-math flags. Sums may be reordered and fused.

Infinities keep their meaning, because softmax needs infinities.
"""


def compiled_as(name: str, **options: Any) -> Callable[[Any], Any]:
    """Return a decorator that compiles a function under a separate name.

    Use the decorator for functions that are made more than once. A cached kernel contains the
    functions that it calls. If two processes compiled different functions under the same name,
    Numba would mistake one function for the other.
    """

    def compile_named(function: Any) -> Any:
        function.__qualname__ = function.__name__ = f"{function.__name__}_{name}"
        return njit(function, **options)

    return compile_named


def _pointer_to(element: Any) -> Any:
    def pointer(typing_context: Any, address: Any) -> Any:
        def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

        return types.CPointer(element)(types.int64), emit

    return intrinsic(pointer)


f32_at = _pointer_to(types.float32)
u16_at = _pointer_to(types.uint16)
u32_at = _pointer_to(types.uint32)
i32_at = _pointer_to(types.int32)
i64_at = _pointer_to(types.int64)
i8_at = _pointer_to(types.int8)


def _emit_take_next(typing_context: Any, counter: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", args[0], ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(types.CPointer(types.int64)), emit


take_next: Any = intrinsic(_emit_take_next)
"""take_next(counter): returns the counter's value and increments it atomically."""


def _emit_as_float(typing_context: Any, bits: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), emit


_as_float: Any = intrinsic(_emit_as_float)


def _emit_widen(typing_context: Any, stored: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if stored == types.float32:
            return args[0]
        if stored == types.int8:
            return builder.sitofp(args[0], ir.FloatType())
        bits = builder.zext(args[0], ir.IntType(32))
        return builder.bitcast(builder.shl(bits, bits.type(16)), ir.FloatType())

    return types.float32(stored), emit


widen: Any = intrinsic(_emit_widen)
"""widen(stored): returns a stored number as float32.

The stored number is bfloat16 bits (uint16), int8 or already float32.
"""


def _emit_narrow(typing_context: Any, value: Any, like: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if like == types.float32:
            return args[0]
        bits = builder.bitcast(args[0], ir.IntType(32))
        odd = builder.and_(builder.lshr(bits, bits.type(16)), bits.type(1))
        rounded = builder.add(builder.add(bits, bits.type(0x7FFF)), odd)
        return builder.trunc(builder.lshr(rounded, bits.type(16)), ir.IntType(16))

    return like(types.float32, like), emit


narrow: Any = intrinsic(_emit_narrow)
"""narrow(value, like): converts a float32 to the format of `like`.

The format is float32 or bfloat16 bits, rounded to the nearest, ties to even.
"""


@njit(inline="always", fastmath=FAST)
def fast_exp(x: Any) -> Any:
    """Return e^x for x <= 0 with a relative error below 2e-7, without a branch; 0 for x below -87.

    Let x = (n + f) * ln 2 with |f| <= 1/2. The bits of the exponent are set to n, and 2^f is
    computed by its Taylor series.
    """
    scaled = np.float32(max(x, np.float32(-87.0))) * np.float32(1.4426950408889634)
    whole = np.floor(scaled + np.float32(0.5))
    f = (scaled - whole) * np.float32(0.6931471805599453)
    p = np.float32(1.0 / 5040.0)
    p = p * f + np.float32(1.0 / 720.0)
    p = p * f + np.float32(1.0 / 120.0)
    p = p * f + np.float32(1.0 / 24.0)
    p = p * f + np.float32(1.0 / 6.0)
    p = p * f + np.float32(0.5)
    p = p * f + np.float32(1.0)
    p = p * f + np.float32(1.0)
    power = _as_float(np.uint32(np.int32(whole) + np.int32(127)) << np.uint32(23))
    return p * power if x > np.float32(-87.0) else np.float32(0.0)


def _emit_as_bits(typing_context: Any, value: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), emit


_as_bits: Any = intrinsic(_emit_as_bits)


@njit
def largest_size(values: Any) -> Any:
    """Return the largest absolute value, or 0 if there are no values.

    The bits are compared as integers, because the compiler vectorizes only a loop over integers.
    """
    top = np.int32(0)
    for j in range(values.size):
        top = max(top, _as_bits(abs(widen(values[j]))))
    return _as_float(np.uint32(top))
