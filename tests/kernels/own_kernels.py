"""Lists the kernels that this machine can run, and those that were compiled."""

import gc

import pytest
from torch import Tensor

from headrace_kernels import launch
from headrace_kernels.groups import quantize_groups
from headrace_kernels.instruction_sets import instruction_sets_here
from headrace_kernels.launch import Kernel
from headrace_kernels.linear import quantize_outputs
from tools.harness.device import DEVICE

ALL_SETS = instruction_sets_here()
HAS_OWN = ALL_SETS[0] != "plain" and DEVICE == "cpu"
OWN_SETS = [one for one in ALL_SETS if one != "plain"] or ["avx2"]
"""The instruction sets of our own kernels that this machine can run."""

needs_own_kernels = pytest.mark.skipif(
    not HAS_OWN, reason="this processor or device runs no kernels but torch's"
)


def compiled_kernels() -> set[str]:
    """Return the names of kernels that this process has run or looked up."""
    kernels = [it for it in gc.get_objects() if type(it) is Kernel and "address" in vars(it)]
    return {f"{it._function.__module__}.{it._function.__name__}" for it in kernels}


def forbid_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if a kernel is used."""

    def never(kernel: Kernel) -> int:
        raise AssertionError("a kernel was compiled")

    monkeypatch.setattr(Kernel, "address", property(never))


def forget_openmp() -> None:
    """Let kernels look for OpenMP as in a new process."""
    for function in (launch._openmp, launch._openmp_fork):
        function.cache_clear()


def rounded(weight: Tensor, quantize: str) -> Tensor:
    """Return the weights of a layer with 8 or 4 bits, in float32."""
    if quantize == "int8":
        stored, scale = quantize_outputs(weight)
        return stored.float() * scale[:, None]
    _, q, scale, minimum = quantize_groups(weight)
    scale, minimum = (part.float().repeat_interleave(32, 1) for part in (scale, minimum))
    return q * scale[:, : q.shape[1]] + minimum[:, : q.shape[1]]
