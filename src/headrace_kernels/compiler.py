"""Compiles each kernel in a separate process, with one process per core at the same time.

If one process compiles several kernels, the kernels share code differently than kernels from
the cache. The last digits of the results then differ. So a process runs only kernels from the
cache. A process compiles a kernel itself only if the child process failed or nothing can be stored.
"""

import os
import signal
import time
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from numba import types
from numba.core.ccallback import CFunc

from headrace_kernels import lean
from headrace_kernels.cache import KernelCache

ON_COMPILE: ContextVar[Callable[[int, int], None]] = ContextVar(
    "on_compile", default=lambda done, total: None
)
"""Called with the number of kernels compiled so far and the total number.

The calls are made in the context that waits for the kernels.
"""

Function = Callable[[Any], None]

_COMPILE_S = 300.0
_POLL_S = 0.005
SIGNATURE = (types.CPointer(types.int64),), types.void


def compiled(function: Function, folder: Path | None) -> Any:
    """Compile the function to a C function with Numba, or load it from the cache in `folder`."""
    compile_missing((function,), folder)
    kernel = _kernel(function, folder)
    kernel.compile()
    return kernel


def compile_missing(functions: Iterable[Function], folder: Path | None) -> None:
    """Compile the kernels that are not in the cache. Return when each is stored or has failed."""
    missing = [it for it in functions if not KernelCache(it, folder).has_code]
    if not missing:
        return
    report = ON_COMPILE.get()
    report(0, len(missing))
    if folder is not None and hasattr(os, "fork"):
        lean.prepare()
        for done in _compile_apart(missing, folder):
            report(done, len(missing))


def _kernel(function: Function, folder: Path | None) -> Any:
    kernel: Any = CFunc(function, SIGNATURE, locals={}, options={})
    kernel._cache = KernelCache(function, folder)
    return kernel


def _compile_apart(functions: list[Function], folder: Path) -> Iterable[int]:
    """Yield the number of finished kernels whenever it grows.

    Kill a process that runs for more than _COMPILE_S seconds.
    """
    waiting, deadlines = list(functions), dict[int, float]()
    while waiting or deadlines:
        while waiting and len(deadlines) < _num_cores():
            deadlines[_fork(waiting.pop(0), folder)] = time.monotonic() + _COMPILE_S
        ended = [child for child in deadlines if os.waitpid(child, os.WNOHANG)[0]]
        for child in ended:
            del deadlines[child]
        if ended:
            yield len(functions) - len(waiting) - len(deadlines)
        for child, deadline in deadlines.items():
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
        time.sleep(_POLL_S)


def _fork(function: Function, folder: Path) -> int:
    child = os.fork()
    if child == 0:
        try:
            lean.become_lean(function.__qualname__)
            _kernel(function, folder).compile()
        finally:
            # The child must not run any other code of the parent.
            os._exit(0)
    return child


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
