"""Fuses many kernels into one call. Threads start once and wait for each other between kernels.

In a decode step, starting the threads often takes longer than the kernel itself.
"""

import ctypes
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np
import torch
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.extending import intrinsic
from numba.np.numpy_support import carray

from headrace_kernels import launch
from headrace_kernels.arguments import Arguments, arguments_of
from headrace_kernels.capture import Call
from headrace_kernels.launch import Kernel, parallel, serial
from headrace_kernels.numeric import i64_at

_WORD = ir.IntType(64).as_pointer()


def _emit_run(typing_context: Any, address: Any, arguments: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_WORD]).as_pointer()
        builder.call(builder.inttoptr(args[0], kind), [builder.inttoptr(args[1], _WORD)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


_run: Any = intrinsic(_emit_run)
"""Calls the function at an address with a pointer to arguments, which the function may ignore."""


@Kernel
def _in_turn(a: Any) -> None:
    """Run all kernels on every thread, one kernel after another.

    A kernel's counter is reset when all threads have finished the kernel.
    """
    g = carray(a, 4)
    kernels = carray(i64_at(g[1]), (g[2], 2))
    for i in range(g[2]):
        _run(kernels[i, 0], kernels[i, 1])
        _run(g[3], 0)
        carray(i64_at(kernels[i, 1]), 1)[0] = 0


IN_TURN: Kernel = _in_turn


def _fused(parts: Sequence[tuple[Kernel, Arguments]], barrier: int) -> Call:
    """Return one call that runs these kernels one after another."""
    pairs = [(body.address, ctypes.addressof(arguments)) for body, arguments in parts]
    table = np.array(pairs, dtype=np.int64)
    for _, arguments in parts:
        arguments[0] = 0
    call: Any = partial(parallel, IN_TURN, arguments_of(table.ctypes.data, len(pairs), barrier))
    # The kernel has only the addresses of these objects, so the call keeps the objects alive.
    call.kept = table, parts
    return call


def fuse(calls: Sequence[Call]) -> list[Call]:
    """Return the calls, with each series of adjacent kernels fused into one call.

    The calls are returned unchanged if there is only one thread, or no barrier for threads.
    """
    barrier = launch.barrier_address()
    if barrier is None or torch.get_num_threads() == 1:
        return list(calls)
    result: list[Call] = []
    for are_kernels, row in groupby(calls, _is_kernel):
        if are_kernels:
            result.append(_fused([call.args for call in row], barrier))  # type: ignore[attr-defined]
        else:
            result += row
    return result


def _is_kernel(call: Call) -> bool:
    return isinstance(call, partial) and call.func in (parallel, serial)
