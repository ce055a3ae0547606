"""Decodes MXFP4, numbers of 4 bits (E2M1) with scales of 8 bits (E8M0), in vectors.

A code is a sign and one of 0, 1/2, 1, 3/2, 2, 3, 4, 6. The decoder returns twice the value of a
code, which is an integer, and half the value of a scale. A scale is a power of two, so the product
of code and scale is exact.
"""

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils

from headrace_kernels.registers import features
from headrace_kernels.tiles import FLOATS, INTS, LANES, PANEL, SHORTS, load

TWICE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the value of each code, indexed by the code."""
_HAS_TABLES = "avx2" in features()
_BYTES = ir.VectorType(ir.IntType(8), SHORTS)


def doubled(builder: Any, codes: Any, has_tables: bool = _HAS_TABLES) -> Any:
    """Return twice the values of SHORTS codes as int8. `codes` are bytes from 0 to 15."""
    if not has_tables:
        return _counted(builder, codes)
    kind = ir.FunctionType(_BYTES, [_BYTES, _BYTES])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx2.pshuf.b")
    table = ir.Constant(_BYTES, [number & 255 for number in TWICE * 2])
    return builder.call(function, [table, codes])


def _counted(builder: Any, codes: Any) -> Any:
    """Compute the same as `doubled` without a table, from a code's sign and its lower three bits m.

    The absolute value is m + max(m - 4, 0) + 2 * max(m - 6, 0).
    """
    b = builder
    m = b.and_(codes, _BYTES([7] * SHORTS))
    over_4, over_6 = (_over(b, m, least) for least in (4, 6))
    size = b.add(b.add(m, over_4), b.add(over_6, over_6))
    is_negative = b.icmp_unsigned(">", codes, _BYTES([7] * SHORTS))
    return b.select(is_negative, b.neg(size), size)


def _over(builder: Any, numbers: Any, least: int) -> Any:
    """Return max(numbers - least, 0)."""
    b, limit = builder, _BYTES([least] * SHORTS)
    return b.select(b.icmp_unsigned(">", numbers, limit), b.sub(numbers, limit), _BYTES([0] * 32))


def half_powers(builder: Any, address: Any) -> list[Any]:
    """Return half the values of PANEL scales, as two vectors of floats.

    A scale is a byte e that stands for 2^(e - 127).
    """
    b, kind = builder, ir.VectorType(ir.IntType(8), LANES)
    found = []
    for v in range(PANEL // LANES):
        e = b.zext(load(b, b.add(address, ir.IntType(64)(LANES * v)), kind, 1), INTS)
        normal = b.shl(b.sub(e, INTS([1] * LANES)), INTS([23] * LANES))
        # The bits of a subnormal float, for exponents below the smallest normal exponent.
        small = b.shl(INTS([1 << 21] * LANES), e)
        bits = b.select(b.icmp_unsigned("<", e, INTS([2] * LANES)), small, normal)
        found.append(b.bitcast(bits, FLOATS))
    return found
