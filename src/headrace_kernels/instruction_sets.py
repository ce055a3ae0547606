"""The instruction sets that kernels are made of, and those this processor has; not yet tried."""

from functools import cache
from typing import Literal, get_args

import llvmlite.binding as llvm  # type: ignore[import-untyped]
from numba.core import config

from headrace_kernels.amx import has_amx

InstructionSet = Literal["amx", "bf16dot", "avx512", "avx2", "plain"]
INSTRUCTION_SETS: tuple[InstructionSet, ...] = get_args(InstructionSet)
"""Best first. plain: torch's own products and attention, no kernel of ours."""

NAMES = {"amx": "AMX", "bf16dot": "AVX512-BF16", "avx512": "AVX-512", "avx2": "AVX2"}


@cache
def instruction_sets_here() -> tuple[InstructionSet, ...]:
    """The best comes first, plain last."""
    has = _features()
    has_512 = {"avx512f", "avx512bw"} <= has
    can_run: dict[InstructionSet, bool] = {
        "amx": has_512 and has_amx(),
        "bf16dot": has_512 and "avx512bf16" in has,
        "avx512": has_512,
        # the same kernels, in shorter registers
        "avx2": not has_512 and {"avx2", "fma", "f16c"} <= has,
        "plain": True,
    }
    return tuple(one for one in INSTRUCTION_SETS if can_run[one])


def _features() -> set[str]:
    """LLVM's names of the instructions that Numba compiles for: NUMBA_CPU_FEATURES or all."""
    stated = config.CPU_FEATURES  # type: ignore[attr-defined]
    if stated is not None:
        return {name[1:] for name in stated.split(",") if name.startswith("+")}
    return {name for name, has in llvm.get_host_cpu_features().items() if has}
