"""Owns how kernels are compiled: each in a process of its own, as many at once as there are cores.

A process that compiles several shares code among them in another way than one that finds them all
in the cache, and the last digits differ. So none runs what it has compiled itself, unless its child
fails or nothing can be kept.
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
"""Hears how many of how many kernels are compiled, while this context waits for them."""

Function = Callable[[Any], None]

_COMPILE_S = 300.0
_POLL_S = 0.005
SIGNATURE = (types.CPointer(types.int64),), types.void


def compiled(function: Function, folder: Path | None) -> Any:
    """A C function of Numba's, out of the cache in that folder if that is possible."""
    compile_missing((function,), folder)
    kernel = _kernel(function, folder)
    kernel.compile()
    return kernel


def compile_missing(functions: Iterable[Function], folder: Path | None) -> None:
    """Compiles those that are not in the cache; returns when all are, or could not be."""
    missing = [it for it in functions if not KernelCache(it, folder).has_code]
    if not missing:
        return
    tell = ON_COMPILE.get()
    tell(0, len(missing))
    if folder is not None and hasattr(os, "fork"):
        lean.prepare()
        for done in _compile_apart(missing, folder):
            tell(done, len(missing))


def _kernel(function: Function, folder: Path | None) -> Any:
    kernel: Any = CFunc(function, SIGNATURE, locals={}, options={})
    kernel._cache = KernelCache(function, folder)
    return kernel


def _compile_apart(functions: list[Function], folder: Path) -> Iterable[int]:
    """Yields the number of kernels that are done, each time it has grown."""
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
            os._exit(0)  # whatever became of it, nothing else of the parent runs on here
    return child


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
