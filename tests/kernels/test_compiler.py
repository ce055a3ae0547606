import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace_kernels import compiler, lean
from headrace_kernels.cache import KernelCache
from headrace_kernels.compiler import ON_COMPILE, compile_missing, compiled


def one(a: Any) -> None:
    a[0] = 1


def two(a: Any) -> None:
    a[0] = 2


def three(a: Any) -> None:
    a[0] = 3


ALL = (one, two, three)


@contextlib.contextmanager
def heard() -> Iterator[list[tuple[int, int]]]:
    told: list[tuple[int, int]] = []
    before = ON_COMPILE.set(lambda done, total: told.append((done, total)))
    try:
        yield told
    finally:
        ON_COMPILE.reset(before)


def run(kernel: Any) -> int:
    words = (ctypes.c_int64 * 1)()
    kernel.ctypes(words)
    return words[0]


def test_missing_kernels_are_compiled_and_their_number_reported(tmp_path: Path) -> None:
    compile_missing((two,), tmp_path)
    with heard() as told:
        compile_missing(ALL, tmp_path)
        compile_missing(ALL, tmp_path)
    assert told[0] == (0, 2) and told[-1] == (2, 2) and told == sorted(told)
    assert all(KernelCache(it, tmp_path).has_code for it in ALL)
    assert [run(compiled(it, tmp_path)) for it in ALL] == [1, 2, 3]


def test_one_kernel_per_core_is_compiled_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running: list[int] = []
    most = []
    fork = compiler._fork

    def counted(function: Any, folder: Path) -> int:
        running.append(fork(function, folder))
        most.append(sum(Path(f"/proc/{it}").exists() for it in running))
        return running[-1]

    monkeypatch.setattr(compiler, "_fork", counted)
    monkeypatch.setattr(compiler, "_num_cores", lambda: 2)
    compile_missing(ALL, tmp_path)
    assert max(most) == 2 and len(most) == 3


def test_a_kernel_is_loaded_from_the_cache_also_the_first_time(tmp_path: Path) -> None:
    assert compiled(one, tmp_path)._cache_hits == 1


@pytest.mark.parametrize("end", ["killed", "failing"])
def test_a_kernel_is_compiled_in_this_process_if_its_own_process_dies(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def become(name: str) -> None:
        if end == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError

    monkeypatch.setattr(lean, "become_lean", become)
    kernel = compiled(one, tmp_path)
    assert kernel._cache_hits == 0 and run(kernel) == 1


def test_a_process_that_hangs_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_COMPILE_S", 0.1)
    monkeypatch.setattr(lean, "become_lean", lambda name: threading.Event().wait())
    with heard() as told:
        compile_missing((one,), tmp_path)
    assert told == [(0, 1), (1, 1)] and not KernelCache(one, tmp_path).has_code


CODE = """
import sys
from pathlib import Path
from tests.kernels.test_compiler import ALL, compiled, run
sys.stdin.read()
print([run(compiled(it, Path(sys.argv[1]))) for it in ALL])
"""


def test_processes_may_compile_the_same_kernels_at_the_same_time(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CODE, str(tmp_path)]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    both = [subprocess.Popen(command, **pipes) for _ in range(2)]
    assert [it.communicate("")[0].strip() for it in both] == ["[1, 2, 3]"] * 2
    assert all(KernelCache(it, tmp_path).has_code for it in ALL)
    assert len(list(tmp_path.iterdir())) == len(ALL)
