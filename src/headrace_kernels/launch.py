"""Runs a compiled kernel on all cores, using torch's own threads instead of a second pool.

A kernel is a C function `void body(int64_t *args)` made by Numba's cfunc. Every thread calls the
function with the same arguments, and takes pieces of work from the counter in `args[0]` until none
is left. A slow or busy core therefore takes fewer pieces.
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
from headrace_kernels.numeric import f32_at, u16_at


class Kernel:
    """A kernel that is compiled, or loaded from the cache, when it first runs.

    A model needs only the kernels for its number formats. Each of these kernels runs once while the
    model is loading.
    """

    def __init__(self, function: Callable[[Any], None]) -> None:
        self._function = function

    @cached_property
    def address(self) -> int:
        address: int = compiled(self._function, kernel_folder()).address
        return address


def kernel_named(name: str, function: Callable[[Any], None]) -> Kernel:
    """Make a kernel from one of several functions with the same source.

    The cache identifies kernels by module and name, so each kernel needs a separate name.
    """
    function.__qualname__ = function.__name__ = name
    return Kernel(function)


def for_each_type(make: Callable[[Any], Callable[[Any], None]]) -> dict[torch.dtype, Kernel]:
    """Make a kernel for bfloat16 and a kernel for float32.

    `make` receives the intrinsic that turns an address into a pointer to numbers of this type.
    """
    by_bf16, by_float = make(u16_at), make(f32_at)
    return {
        torch.bfloat16: kernel_named(f"{by_bf16.__name__}_bf16", by_bf16),
        torch.float32: kernel_named(f"{by_float.__name__}_float", by_float),
    }


_listed: ContextVar[dict[Kernel, None] | None] = ContextVar("listed", default=None)


@contextlib.contextmanager
def listed() -> Iterator[dict[Kernel, None]]:
    """List the kernels that are launched in this context, without running the kernels."""
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
    """Compile the kernels that are not compiled yet, several at the same time."""
    compile_missing([it._function for it in kernels if "address" not in vars(it)], kernel_folder())


def parallel(body: Kernel, arguments: Arguments) -> None:
    """Run `body` on all threads; return when the work is done."""
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
    """Run `body` on the calling thread, for work that takes less time than waking a thread."""
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
    """Return the OpenMP library that torch uses, or None if this is not GNU's library."""
    # Some builds of torch load the library only at the first parallel loop.
    torch.ones(1 << 16).sum()
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
    """Return the address of a C function that makes the threads of a kernel wait for each other.

    The function takes no arguments. Returns None without GNU's OpenMP.
    """
    library = _openmp()
    if library is None or _openmp_fork() is None:
        return None
    return ctypes.cast(library.GOMP_barrier, ctypes.c_void_p).value


@cache
def _python_threads(num_threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(num_threads, thread_name_prefix="kernel")


def _parallel_by_python(call: Any, arguments: Arguments, num_threads: int) -> None:
    """Run a kernel on Python threads, which start more slowly than torch's. Results are the same.

    The threads run in parallel because ctypes releases the GIL during a call.
    """
    others = [_python_threads(num_threads).submit(call, arguments) for _ in range(num_threads - 1)]
    call(arguments)
    for other in others:
        other.result()
