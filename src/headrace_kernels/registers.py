"""Determines how large a tile of sums can be with the registers of this processor."""

import platform

import llvmlite.binding as llvm  # type: ignore[import-untyped]
from numba import njit
from numba.core import config


def features() -> set[str]:
    """Return LLVM's names of the CPU features that Numba compiles for.

    NUMBA_CPU_FEATURES names the features. By default, all features of this processor are used.
    """
    stated = config.CPU_FEATURES  # type: ignore[attr-defined]
    if stated is not None:
        return {name[1:] for name in stated.split(",") if name.startswith("+")}
    found = {name for name, has in llvm.get_host_cpu_features().items() if has}
    is_arm = platform.machine() in ("aarch64", "arm64")
    # Every 64-bit ARM processor has NEON, even if LLVM does not report NEON.
    return found | {"neon"} if is_arm else found


WIDE = {"avx512f", "avx512bw"}
HAS_512 = features() >= WIDE
MULTIPLIES_BYTES = "avx2" in features() and not HAS_512
"""Whether rows become bytes for products with 4-bit weights; otherwise rows become int16.

One instruction of AVX2 multiplies 32 bytes or 16 int16 numbers. AVX-512 could multiply bytes, too,
but these kernels were not tried on it. AMX needs weights in another order.
"""
MAX_TILE_ROWS = 12 if HAS_512 else 6
"""The number of rows of the largest tile.

In addition to its sums, a tile needs registers for weights, a mask and an input:

32 registers of 16 floats: 12 rows x 2 vectors = 24 sums + 4 weights + 1 mask + 1 input = 30
16 registers of  8 floats:  6 rows x 1 vector, two halves each, = 12 sums + 2 + 1 + 1 = 16
32 registers of  4 floats:  6 rows x 1 vector, four quarters each, = 24 sums + 4 + 1 + 1 = 30
"""


@njit(inline="always")
def padded_rows(num_rows: int) -> int:
    """Return how many rows the tiles for `num_rows` rows read and write."""
    if HAS_512:
        return (num_rows + 3) // 4 * 4
    if num_rows <= 2:
        return num_rows
    left = num_rows % MAX_TILE_ROWS
    return num_rows - left + (MAX_TILE_ROWS if left > 4 else 4 if left else 0)
