"""Owns how large tiles of sums are: what fits the registers of a processor."""

import platform

import llvmlite.binding as llvm  # type: ignore[import-untyped]
from numba import njit
from numba.core import config


def features() -> set[str]:
    """LLVM's names of the instructions that Numba compiles for: NUMBA_CPU_FEATURES or all."""
    stated = config.CPU_FEATURES  # type: ignore[attr-defined]
    if stated is not None:
        return {name[1:] for name in stated.split(",") if name.startswith("+")}
    found = {name for name, has in llvm.get_host_cpu_features().items() if has}
    is_arm = platform.machine() in ("aarch64", "arm64")
    return found | {"neon"} if is_arm else found  # all have it, also where LLVM is not told


WIDE = {"avx512f", "avx512bw"}
HAS_512 = features() >= WIDE
MANY = 12 if HAS_512 else 6
"""Rows of the largest tile. Beside its sums a tile needs room for weights and an input:

32 registers of 16 floats: 12 rows x 2 vectors = 24 sums + 4 weights + 1 mask + 1 input = 30
16 registers of  8 floats:  6 rows x 1 vector, two halves each, = 12 sums + 2 + 1 + 1 = 16
32 registers of  4 floats:  6 rows x 1 vector, four quarters each, = 24 sums + 4 + 1 + 1 = 30
"""


@njit(inline="always")
def reached(num_rows: int) -> int:
    """Rows that the tiles of so many rows read and write."""
    if HAS_512:
        return (num_rows + 3) // 4 * 4
    if num_rows <= 2:
        return num_rows
    left = num_rows % MANY
    return num_rows - left + (MANY if left > 4 else 4 if left else 0)
