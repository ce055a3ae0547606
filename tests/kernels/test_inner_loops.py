"""Tests that the inner loops of the largest tiles keep nearly all values in AVX2 registers."""

import os
import subprocess
import sys

import llvmlite.binding as llvm
import pytest

FEATURES = {str(name): bool(has) for name, has in llvm.get_host_cpu_features().items()}
HELD = ",".join(
    f"{'+' if has and not name.startswith(('avx512', 'amx')) else '-'}{name}"
    for name, has in FEATURES.items()
)


@pytest.mark.skipif(not FEATURES.get("avx2"), reason="this processor has no AVX2")
@pytest.mark.parametrize(
    "name, products, most",
    [("bfloat16", 24, 0), ("8 bits", 12, 0), ("4 bits in groups", 24, 7)],
)
def test_the_inner_loop_of_the_largest_tile_hardly_uses_the_stack(
    name: str, products: int, most: int
) -> None:
    said = subprocess.run(
        [sys.executable, "-m", "headrace_kernels.inner_loops", name],
        env=os.environ | {"NUMBA_CPU_FEATURES": HELD},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    loops = [line.removeprefix(name).split() for line in said.splitlines()[1:]]
    assert min(int(stack) for _, number, stack in loops if int(number) == products) <= most
