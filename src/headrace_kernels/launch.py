"""Owns how a compiled kernel runs on all cores: always torch's own threads, no second pool.

A kernel is a C function `void body(int64_t *args)`, made by Numba's cfunc. Every participant
calls it with the same arguments and takes pieces of work from the counter in `args[0]` until none
is left, so a slow or busy core takes fewer pieces.
"""

import ctypes
import hashlib
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from numba import types
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.ccallback import CFunc

from headrace_kernels.arguments import Arguments
from headrace_kernels.capture import note

ON_COMPILE: ContextVar[Callable[[str], None]] = ContextVar("on_compile", default=lambda name: None)
"""Hears the name of each kernel that this context is about to wait for, while it is compiled."""

_COMPILE_S = 300.0
_SIGNATURE = (types.CPointer(types.int64),), types.void


@cache
def digest(folder: Path) -> str:
    """Over the names and contents of its files of Python."""
    whole = hashlib.sha256()
    for file in sorted(folder.glob("*.py")):
        whole.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
    return whole.hexdigest()


class KernelCache(FunctionCache):
    """Machine code beside its source, thrown away when any file of this folder has changed.

    Numba's own notices changes of the kernel's file only, and most of a kernel lies in others.
    """

    def __init__(self, function: Callable[[Any], None], stamp: str) -> None:
        super().__init__(function)
        self._cache_file = IndexDataCacheFile(self._cache_path, self._impl.filename_base, stamp)

    def has(self, kernel: Any) -> bool:
        """Whether the kernel would be found."""
        codegen = kernel._targetdescr.target_context.codegen()
        return self._index_key(kernel._sig, codegen) in self._cache_file._load_index()


def compiled(function: Callable[[Any], None], stamp: str) -> Any:
    """A C function of Numba's, out of the cache, where a child of this process has put it.

    A process that compiles shares code among its kernels in another way than one that finds them
    all in the cache, and the last digits differ. So none runs what it has compiled itself, unless
    the child fails.
    """
    kernel: Any = CFunc(function, _SIGNATURE, locals={}, options={})
    kernel._cache = KernelCache(function, stamp)
    if not kernel._cache.has(kernel):
        ON_COMPILE.get()(function.__name__.strip("_").replace("_", " "))
        if hasattr(os, "fork"):
            _compile_apart(kernel)
    kernel.compile()
    return kernel


def _compile_apart(kernel: Any) -> None:
    child = os.fork()
    if child == 0:
        try:
            kernel.compile()
        finally:
            os._exit(0)  # whatever became of it, nothing else of the parent runs on here
    deadline = time.monotonic() + _COMPILE_S
    while os.waitpid(child, os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.005)


class Kernel:
    """A kernel that is compiled, or found in Numba's cache, when it is first run.

    A model needs those of its own number formats only; loading it runs each of them once.
    """

    def __init__(self, function: Callable[[Any], None]) -> None:
        self._function = function

    @cached_property
    def address(self) -> int:
        address: int = compiled(self._function, digest(Path(__file__).parent)).address
        return address


def parallel(body: Kernel, arguments: Arguments) -> None:
    """Run `body` on all threads; returns when the work is done."""
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
