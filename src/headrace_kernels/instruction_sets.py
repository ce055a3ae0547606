"""Lists all instruction sets of the kernels, and the sets that this processor has.

choose.py checks whether the kernels give correct results.
"""

from functools import cache
from typing import Literal, get_args

from headrace_kernels.amx import has_amx
from headrace_kernels.registers import WIDE, features

InstructionSet = Literal["amx", "bf16dot", "avx512", "avx2", "neon", "plain"]
INSTRUCTION_SETS: tuple[InstructionSet, ...] = get_args(InstructionSet)
"""The sets, best first. plain: torch's own products and attention, without these kernels."""

NAMES = {
    "amx": "AMX",
    "bf16dot": "AVX512-BF16",
    "avx512": "AVX-512",
    "avx2": "AVX2",
    "neon": "NEON",
}


@cache
def instruction_sets_here() -> tuple[InstructionSet, ...]:
    """Return the sets that this processor has, the best first and plain last."""
    has = features()
    has_512 = has >= WIDE
    can_run: dict[InstructionSet, bool] = {
        "amx": has_512 and has_amx(),
        "bf16dot": has_512 and "avx512bf16" in has,
        "avx512": has_512,
        # avx2 uses the same kernels as avx512, but compiled for shorter registers. So only one of
        # the two sets can be used.
        "avx2": not has_512 and {"avx2", "fma", "f16c"} <= has,
        "neon": "neon" in has,
        "plain": True,
    }
    return tuple(one for one in INSTRUCTION_SETS if can_run[one])
