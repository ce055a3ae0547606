"""Which forms of the kernels a processor can run: told from its instructions, not yet tried."""

from functools import cache
from typing import Literal, get_args

import llvmlite.binding as llvm  # type: ignore[import-untyped]
from numba.core import config

from headrace.runner.kernels.amx import has_amx

Form = Literal["amx", "bf16dot", "avx512", "avx2", "plain"]
FORMS: tuple[Form, ...] = get_args(Form)
"""Best first. plain: torch's own products and attention, no kernel of ours."""

INSTRUCTIONS = {"amx": "AMX", "bf16dot": "AVX512-BF16", "avx512": "AVX-512", "avx2": "AVX2"}
"""What a form is made of."""


@cache
def forms_here() -> tuple[Form, ...]:
    """The best comes first, plain last."""
    has = _features()
    has_512 = {"avx512f", "avx512bw"} <= has
    can_run: dict[Form, bool] = {
        "amx": has_512 and has_amx(),
        "bf16dot": has_512 and "avx512bf16" in has,
        "avx512": has_512,
        # the same kernels, in shorter registers
        "avx2": not has_512 and {"avx2", "fma", "f16c"} <= has,
        "plain": True,
    }
    return tuple(form for form in FORMS if can_run[form])


def _features() -> set[str]:
    """LLVM's names of the instructions that Numba compiles for: NUMBA_CPU_FEATURES or all."""
    stated = config.CPU_FEATURES  # type: ignore[attr-defined]
    if stated is not None:
        return {name[1:] for name in stated.split(",") if name.startswith("+")}
    return {name for name, has in llvm.get_host_cpu_features().items() if has}
