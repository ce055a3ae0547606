"""Owns numbers of four bits (E2M1) and scales of eight (E8M0), as MXFP4 has them, in vectors.

A code is a sign and one of 0, 1/2, 1, 3/2, 2, 3, 4, 6. Here it is twice that, a whole number, and
half of its scale, which is a power of two: their product is the value, exactly.
"""

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils

from headrace_kernels.registers import features
from headrace_kernels.tiles import FLOATS, INTS, LANES, PANEL, SHORTS, load

TWICE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""By code."""
_HAS_TABLES = "avx2" in features()
_BYTES = ir.VectorType(ir.IntType(8), SHORTS)


def doubled(builder: Any, codes: Any, has_tables: bool = _HAS_TABLES) -> Any:
    """Twice the numbers of SHORTS codes from 0 to 15, in bytes, as int8."""
    if not has_tables:
        return _counted(builder, codes)
    kind = ir.FunctionType(_BYTES, [_BYTES, _BYTES])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx2.pshuf.b")
    table = ir.Constant(_BYTES, [number & 255 for number in TWICE * 2])
    return builder.call(function, [table, codes])


def _counted(builder: Any, codes: Any) -> Any:
    """The same of m = code & 7, by m + (m over 4) + 2 (m over 6), and the sign."""
    b = builder
    m = b.and_(codes, _BYTES([7] * SHORTS))
    over_4, over_6 = (_over(b, m, least) for least in (4, 6))
    size = b.add(b.add(m, over_4), b.add(over_6, over_6))
    is_negative = b.icmp_unsigned(">", codes, _BYTES([7] * SHORTS))
    return b.select(is_negative, b.neg(size), size)


def _over(builder: Any, numbers: Any, least: int) -> Any:
    """By how much they are larger; 0 if they are not."""
    b, limit = builder, _BYTES([least] * SHORTS)
    return b.select(b.icmp_unsigned(">", numbers, limit), b.sub(numbers, limit), _BYTES([0] * 32))


def half_powers(builder: Any, address: Any) -> list[Any]:
    """Half of PANEL scales, bytes e for 2^(e - 127), as two vectors of floats."""
    b, kind = builder, ir.VectorType(ir.IntType(8), LANES)
    found = []
    for v in range(PANEL // LANES):
        e = b.zext(load(b, b.add(address, ir.IntType(64)(LANES * v)), kind, 1), INTS)
        normal = b.shl(b.sub(e, INTS([1] * LANES)), INTS([23] * LANES))
        small = b.shl(INTS([1 << 21] * LANES), e)  # below the exponents that a float has
        bits = b.select(b.icmp_unsigned("<", e, INTS([2] * LANES)), small, normal)
        found.append(b.bitcast(bits, FLOATS))
    return found
