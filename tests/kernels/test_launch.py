import gc
import importlib
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from numba.core.dispatcher import Dispatcher

from headrace_kernels import launch
from headrace_kernels.launch import ON_COMPILE, compiled, digest
from headrace_kernels.linear import PackedLinear

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


def test_kernels_add_no_thread_to_those_of_torch() -> None:
    found = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "0"


def test_without_torchs_openmp_kernels_run_on_threads_of_python(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "_openmp_fork", lambda: None)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    weight, x = torch.randint(-9, 9, (500, 64)).bfloat16(), torch.randint(-9, 9, (3, 64)).bfloat16()
    found = PackedLinear(weight, None, None)(x)
    assert torch.equal(found, (x.float() @ weight.float().T).bfloat16())


def test_every_piece_is_done_exactly_once() -> None:
    torch.manual_seed(0)
    weight, x = (
        torch.randint(-9, 9, (1000, 32)).bfloat16(),
        torch.randint(-9, 9, (1, 32)).bfloat16(),
    )
    for _ in range(50):
        found = PackedLinear(weight, None, None)(x)
        assert torch.equal(found, (x.float() @ weight.float().T).bfloat16())


def kernel(a: Any) -> None:
    a[0] = 7


def test_machine_code_is_kept_until_a_file_of_the_folder_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launch, "_compile_apart", lambda kernel: None)
    first, *_, again, other = (compiled(kernel, stamp) for stamp in ("a", "b", "b", "c"))
    assert (first._cache_hits, again._cache_hits, other._cache_hits) == (0, 1, 0)


def test_what_runs_is_out_of_the_cache_the_first_time_too() -> None:
    assert compiled(kernel, "d")._cache_hits == 1


def test_who_asks_hears_of_a_kernel_that_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    monkeypatch.setattr(launch, "_compile_apart", lambda kernel: None)
    before = ON_COMPILE.set(told.append)
    try:
        compiled(kernel, "e")
        assert told == ["kernel"]
        compiled(kernel, "e")
        assert told == ["kernel"]
    finally:
        ON_COMPILE.reset(before)


def test_a_digest_is_over_the_content_of_every_file_of_the_folder(tmp_path: Path) -> None:
    def written(**files: str) -> str:
        for name, text in files.items():
            (tmp_path / f"{name}.py").write_text(text)
        return digest.__wrapped__(tmp_path)

    first = written(kernel="import helper", helper="x = 1")
    assert written(helper="x = 2") != first
    assert written(helper="x = 1") == first
    assert written(another="") != first


def test_a_kernels_stamp_is_the_digest_of_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    stamps = []
    monkeypatch.setattr(launch, "compiled", lambda _, stamp: stamps.append(stamp) or Address)
    assert launch.Kernel(kernel).address == Address.address
    assert stamps == [digest(Path(launch.__file__).parent)]


class Address:
    address = 1


def test_no_two_functions_of_kernels_have_one_name() -> None:
    """Out of the cache, one would be taken for the other: wrong digits, with every check passed."""
    folder = launch.__name__.rpartition(".")[0]
    for file in Path(launch.__file__).parent.glob("*.py"):
        importlib.import_module(f"{folder}.{file.stem}")
    functions = {
        it.py_func
        for it in gc.get_objects()
        if issubclass(type(it), Dispatcher) and it.py_func.__module__.startswith(folder)
    }
    names = Counter((it.__module__, it.__qualname__) for it in functions)
    assert len(names) > 20
    assert [name for name, count in names.items() if count > 1] == []
