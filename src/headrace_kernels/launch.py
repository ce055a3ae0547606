"""Owns how a compiled kernel runs on all cores: always torch's own threads, no second pool.

A kernel is a C function `void body(int64_t *args)`, made by Numba's cfunc. Every participant
calls it with the same arguments and takes pieces of work from the counter in `args[0]` until none
is left, so a slow or busy core takes fewer pieces.
"""

import contextlib
import ctypes
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from functools import cache, cached_property
from typing import Any

import torch

from headrace_kernels.arguments import Arguments
from headrace_kernels.cache import kernel_folder
from headrace_kernels.capture import note
from headrace_kernels.compiler import compile_missing, compiled


class Kernel:
    """A kernel that is compiled, or found in the cache, when it is first run.

    A model needs those of its own number formats only; loading it runs each of them once.
    """

    def __init__(self, function: Callable[[Any], None]) -> None:
        self._function = function

    @cached_property
    def address(self) -> int:
        address: int = compiled(self._function, kernel_folder()).address
        return address


_listed: ContextVar[dict[Kernel, None] | None] = ContextVar("listed", default=None)


@contextlib.contextmanager
def listed() -> Iterator[dict[Kernel, None]]:
    """Kernels that would be run in this context are not run, but listed."""
    kernels: dict[Kernel, None] = {}
    before = _listed.set(kernels)
    try:
        yield kernels
    finally:
        _listed.reset(before)


def _is_listed(body: Kernel) -> bool:
    if (kernels := _listed.get()) is None:
        return False
    kernels[body] = None
    return True


def compile_all(kernels: Iterable[Kernel]) -> None:
    """Has those that are not compiled yet compiled, several at once."""
    compile_missing([it._function for it in kernels if "address" not in vars(it)], kernel_folder())


def parallel(body: Kernel, arguments: Arguments) -> None:
    """Run `body` on all threads; returns when the work is done."""
    if _is_listed(body):
        return
    note(parallel, body, arguments)
    arguments[0] = 0
    num_threads = torch.get_num_threads()
    if num_threads == 1:
        _callable(body.address)(arguments)
    elif (fork := _openmp_fork()) is not None:
        fork(body.address, arguments, num_threads, 0)
    else:
        _parallel_by_python(_callable(body.address), arguments, num_threads)


def serial(body: Kernel, arguments: Arguments) -> None:
    """Run `body` on the calling thread: for work that is smaller than waking another."""
    if _is_listed(body):
        return
    note(serial, body, arguments)
    arguments[0] = 0
    _callable(body.address)(arguments)


@cache
def _callable(address: int) -> Any:
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)


@cache
def _openmp() -> ctypes.CDLL | None:
    """The OpenMP library that torch itself runs on; None where it is not GNU's."""
    torch.ones(1 << 16).sum()  # some builds load the library at the first parallel loop
    try:
        with open("/proc/self/maps") as maps:
            paths = {line.split()[-1] for line in maps if "libgomp" in line}
    except OSError:
        return None
    return ctypes.CDLL(min(paths, key=lambda p: ("torch" not in p, p))) if paths else None


@cache
def _openmp_fork() -> Any | None:
    library = _openmp()
    if library is None:
        return None
    fork = library.GOMP_parallel
    fork.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    fork.restype = None
    return fork


def barrier_address() -> int | None:
    """The C function, without arguments, by which the threads of a kernel wait for each other."""
    library = _openmp()
    if library is None or _openmp_fork() is None:
        return None
    return ctypes.cast(library.GOMP_barrier, ctypes.c_void_p).value


@cache
def _python_threads(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, thread_name_prefix="kernel")


def _parallel_by_python(call: Any, arguments: Arguments, num_threads: int) -> None:
    """Slower to start (ctypes releases the lock while it runs), same results."""
    others = [_python_threads(num_threads).submit(call, arguments) for _ in range(num_threads - 1)]
    call(arguments)
    for other in others:
        other.result()
