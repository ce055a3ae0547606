"""Emits the instructions of Intel AMX, the CPU's matrix unit that multiplies tiles of bfloat16.

A tile has up to 16 rows of 64 bytes. A row of the right factor holds one pair of numbers for each
of 16 outputs. The unit multiplies each pair with two neighbouring numbers in a row of the left
factor. Packed weights and cache blocks are already stored in this order. The sums of a row do not
depend on the other rows of the tile.
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

# The maximum number of rows of a tile, and the number of outputs of a tile.
TILE = 16
# The number of inputs or positions that one step multiplies.
DEEP = 32
_ROW_BYTES = 64
# Numbers of tile registers: four for sums, then two for each factor.
_SUMS, _LEFT, _RIGHT = 0, 4, 6
_BYTE, _I64 = ir.IntType(8), ir.IntType(64)
_POINTER = _BYTE.as_pointer()


def has_amx() -> bool:
    """Return whether AMX can be used by compiled code in this process.

    The CPU must have AMX, and the system must allow its use. Numba must compile for this CPU, not
    for another CPU.
    """
    is_host = not (config.CPU_NAME or config.CPU_FEATURES)  # type: ignore[attr-defined]
    return is_host and _is_available()


def _features() -> set[str]:
    return {name for name, has in llvm.get_host_cpu_features().items() if has}


@cache
def _is_available() -> bool:
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
"""Releases the tile registers.

Every kernel calls this intrinsic at the end. Otherwise the system would save the tile registers
of the thread at every switch to another thread.
"""


@njit
def configure(table: Any, upper: int, lower: int) -> None:
    """Configure the tile registers for two tiles of left rows and their sums.

    upper, lower: the number of rows of the two tiles, each at most 16; 0 leaves a tile out.
    table: uint8 [64], all zeros at the first call.
    """
    table[0] = 1
    for register in range(8):
        rows = TILE if register >= _RIGHT else upper if register in (0, 1, _LEFT) else lower
        table[48 + register] = rows
        table[16 + 2 * register] = _ROW_BYTES if rows else 0
    load_table(table)


def amx_tile(num_tiles: int, adds: bool) -> Any:
    """Return an intrinsic tile(x, memory, steps, out, (row, column, first, stride, there,
    num_lines)).

    The intrinsic multiplies the rows of one or two tiles with 32 columns of the memory. `configure`
    must have set the tiles. x [rows, numbers] holds bfloat16 bits and out is float32; the rows of x
    and out are contiguous. A word is two bfloat16 numbers. For each row m of these tiles and each
    n < 32:

        out[row + m, column + n] = sum over steps i and words k < 16 of
            the two numbers of x[row + m] at 32 * i + 2 * k
            times the two numbers of word n at byte steps[i] + first + k * stride of the memory

    If `adds` is true, the sum is added to out. Each step also prefetches the next `num_lines` cache
    lines (at least 1), counted from address `there`.
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
"""fetch_lines(address, count): prefetches `count` cache lines (at least 1) from `address` on."""
