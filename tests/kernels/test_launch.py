import gc
import importlib
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from numba.core.dispatcher import Dispatcher

from headrace_kernels import launch
from headrace_kernels.launch import Kernel, listed
from headrace_kernels.linear import PackedLinear
from tests.kernels.own_kernels import needs_own_kernels

CODE = """
import os, torch
from headrace_kernels.linear import PackedLinear
torch.set_num_threads(3)
a = torch.ones(256, 256)
def use():
    torch.mm(a, a); torch.ones(1 << 20).sum()
use()
before = len(os.listdir("/proc/self/task"))
weight = torch.ones(512, 256, dtype=torch.int8)
for _ in range(3):
    PackedLinear(weight, None, None)(torch.ones(1, 256))
    use()
print(len(os.listdir("/proc/self/task")) - before)
"""


def test_kernels_use_the_threads_of_torch() -> None:
    found = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "0"


def test_without_torchs_openmp_kernels_run_in_python_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "_openmp_fork", lambda: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    weight, x = torch.randint(-9, 9, (500, 64)).bfloat16(), torch.randint(-9, 9, (3, 64)).bfloat16()
    found = PackedLinear(weight, None, None)(x)
    assert torch.equal(found, (x.float() @ weight.float().T).bfloat16())


def test_every_part_is_computed_exactly_once() -> None:
    torch.manual_seed(0)
    weight, x = (
        torch.randint(-9, 9, (1000, 32)).bfloat16(),
        torch.randint(-9, 9, (1, 32)).bfloat16(),
    )
    for _ in range(50):
        found = PackedLinear(weight, None, None)(x)
        assert torch.equal(found, (x.float() @ weight.float().T).bfloat16())


@needs_own_kernels
def test_listing_kernels_does_not_run_them() -> None:
    layer = PackedLinear(torch.ones(64, 32).bfloat16(), None, None)
    x = torch.ones(1, 32).bfloat16()
    with listed() as kernels:
        layer(x)
        layer(x)
    assert [it._function.__module__ for it in kernels] == ["headrace_kernels.product"]
    assert torch.equal(layer(x), torch.full((1, 64), 32).bfloat16())


def test_kernel_functions_have_different_names() -> None:
    """The cache would confuse functions with the same name."""
    folder = launch.__name__.rpartition(".")[0]
    for file in Path(launch.__file__).parent.glob("*.py"):
        importlib.import_module(f"{folder}.{file.stem}")
    functions = {
        it.py_func
        for it in gc.get_objects()
        if issubclass(type(it), Dispatcher) and it.py_func.__module__.startswith(folder)
    }
    kernels = [it._function for it in gc.get_objects() if type(it) is Kernel]
    functions |= {it for it in kernels if it.__module__.startswith(folder)}
    names = Counter((it.__module__, it.__qualname__) for it in functions)
    assert len(names) > 20
    assert [name for name, count in names.items() if count > 1] == []
