"""Owns the use of Intel's AMX, the unit of a processor that multiplies tiles of bfloat16.

A tile is 16 rows of 64 bytes. A row of the right factor holds pairs of numbers, and each pair meets
two neighbours of the left factor. Packed weights and blocks of the cache already lie that way. A
row's sums are the same whichever rows come with it.
"""

from functools import cache
from typing import Any

import llvmlite.binding as llvm  # type: ignore[import-untyped]
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils, config
from numba.extending import intrinsic

from headrace_kernels.private import allow_amx
from headrace_kernels.tiles import CACHE_LINE, Matrix, fetch, loop

TILE = 16  # rows, and outputs
DEEP = 32  # numbers of a row that meet in one step: inputs, or positions
_ROW_BYTES = 64
_SUMS, _LEFT, _RIGHT = 0, 4, 6  # registers: four of sums, two each of the factors
_BYTE, _I64 = ir.IntType(8), ir.IntType(64)
_POINTER = _BYTE.as_pointer()


def has_amx() -> bool:
    """Whether there is one, the system lets this process use it, and compiled code may name it."""
    is_host = not (config.CPU_NAME or config.CPU_FEATURES)  # type: ignore[attr-defined]
    return is_host and _is_there()


def _features() -> set[str]:
    return {name for name, has in llvm.get_host_cpu_features().items() if has}


@cache
def _is_there() -> bool:
    return {"amx-bf16", "amx-int8"} <= _features() and allow_amx()


def call(builder: Any, name: str, *args: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
    builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.x86.{name}"), args)


def move(builder: Any, name: str, register: int, address: Any, stride: Any) -> None:
    call(builder, name, _BYTE(register), builder.inttoptr(address, _POINTER), stride)


def _emit_configure(typing_context: Any, table: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        call(builder, "ldtilecfg", builder.bitcast(array.data, _POINTER))
        return context.get_dummy_value()

    return types.void(table), emit


def _emit_release(typing_context: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), emit


load_table: Any = intrinsic(_emit_configure)
release: Any = intrinsic(_emit_release)
"""Call it when a kernel is done: the system saves the tiles of each thread that holds any."""


@njit
def configure(table: Any, upper: int, lower: int) -> None:
    """Rows of the left factor and of the sums, at most 16 in each of two tiles; 0: none.

    table: 64 bytes of zeros at first.
    """
    table[0] = 1
    for register in range(8):
        rows = TILE if register >= _RIGHT else upper if register in (0, 1, _LEFT) else lower
        table[48 + register] = rows
        table[16 + 2 * register] = _ROW_BYTES if rows else 0
    load_table(table)


def amx_tile(num_tiles: int, adds: bool) -> Any:
    """tile(x, memory, steps, out, (row, column, first, stride, there, num_lines)), as configured.

    x [rows, numbers] are bfloat16 bits, out is float32; rows of both are contiguous. For the rows
    of one or two tiles from `row` on: out[row + m, column + n], n < 32, = the sum over steps i and
    words k < 16 of x[row + m, 32 * i + 2 * k] times word n, of two numbers, at byte
    steps[i] + first + k * stride of the memory. With `adds` the sum is added. With each step the
    next `num_lines`, at least 1, cache lines from address `there` on are fetched.
    """

    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kinds = signature.args
        x, memory, steps, out = (Matrix(context, builder, kinds[i], args[i]) for i in range(4))
        row, column, first, stride, there, num_lines = cgutils.unpack_tuple(builder, args[4])
        b = builder
        places = []
        for m in range(num_tiles):
            number = b.add(row, _I64(TILE * m))
            places += [out.at(number, b.add(column, _I64(TILE * n))) for n in range(2)]
        for i, place in enumerate(places):
            if adds:
                move(b, "tileloadd64", _SUMS + i, place, out.row_bytes)
            else:
                call(b, "tilezero", _BYTE(_SUMS + i))
        begin, rows = b.add(memory.base, first), [x.row(row, TILE * m) for m in range(num_tiles)]

        def body(at: Any, values: list[Any]) -> list[Any]:
            line = b.add(begin, steps.item(at))
            for n in range(2):
                right = b.add(line, _I64(_ROW_BYTES * n))
                move(b, "tileloadd64", _RIGHT + n, right, stride)
            for m, start in enumerate(rows):
                left = b.add(start, b.mul(at, _I64(_ROW_BYTES)))
                move(b, "tileloadd64", _LEFT + m, left, x.row_bytes)
                for n in range(2):
                    registers = _SUMS + 2 * m + n, _LEFT + m, _RIGHT + n
                    call(b, "tdpbf16ps", *[_BYTE(number) for number in registers])
            loop(b, num_lines, values, _fetch_next(b))
            return [b.add(values[0], b.mul(num_lines, _I64(CACHE_LINE)))]

        loop(b, steps.shape[0], [there], body)
        for i, place in enumerate(places):
            move(b, "tilestored64", _SUMS + i, place, out.row_bytes)
        return context.get_dummy_value()

    def typed(typing: Any, x: Any, memory: Any, steps: Any, out: Any, at: Any) -> Any:
        return types.void(x, memory, steps, out, at), emit

    return intrinsic(typed)


def _fetch_next(builder: Any) -> Any:
    def body(at: Any, values: list[Any]) -> list[Any]:
        fetch(builder, values[0])
        return [builder.add(values[0], _I64(CACHE_LINE))]

    return body


def _emit_fetch(typing_context: Any, address: Any, count: Any) -> Any:
    def emit(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        loop(builder, args[1], [args[0]], _fetch_next(builder))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


fetch_lines: Any = intrinsic(_emit_fetch)
"""fetch_lines(address, count): asks for `count` cache lines, at least 1."""
