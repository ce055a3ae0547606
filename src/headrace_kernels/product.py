"""Owns the product of rows with a packed matrix, for one row as for thousands.

Weights are packed once, in panels of 32 outputs: what belongs to one input lies side by side, so a
panel streams from memory in one go, and a vector holds 16 outputs. Each vector of weights widens in
registers and meets one number each of up to 12 rows, spread over a vector. AMX takes bfloat16 as
it lies. The sums of a row are the same whatever rows are with it.

int8 weights meet integers too: groups of 128 inputs are scaled to int16, which is finer than
bfloat16 for all that is within a hundredth of the group's largest, and summed exactly.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numba import njit
from numba.np.numpy_support import carray
from torch import Tensor

from headrace_kernels.amx import (
    DEEP,
    TILE,
    amx_tile,
    configure,
    release,
)
from headrace_kernels.amx_int8 import GROUP, multiply_bytes, split
from headrace_kernels.arguments import arguments_of, reader
from headrace_kernels.instruction_sets import InstructionSet, instruction_sets_here
from headrace_kernels.launch import Kernel, parallel
from headrace_kernels.numeric import (
    compiled_as,
    f32_at,
    i8_at,
    largest_size,
    narrow,
    take_next,
    u16_at,
    widen,
)
from headrace_kernels.registers import HAS_512, MANY, reached
from headrace_kernels.tiles import (
    CACHE_LINE,
    PANEL,
    empty_rows,
    num_tiles,
    over_panel,
    panel_tile,
)

_LINES = 128  # that stay in the first cache while all rows pass, where a tile has few of these
BLOCK_BYTES = (600 if HAS_512 else 300) << 10  # of widened rows: they stay in the second cache
Kernels = Mapping[torch.dtype, Kernel]
_INT16_MAX = np.float32(32767)
_amx_2, _amx_1 = amx_tile(2, False), amx_tile(1, False)
_LINE_BYTES = 4 * PANEL  # of a panel's line, two bfloat16 numbers for each output
_STEP_BYTES = TILE * _LINE_BYTES
_AMX_ROWS = 2 * TILE  # at once
_FEW_ROWS = 16  # up to which int8 is not worth laying out for AMX


_take = over_panel("product", panel_tile)


@njit
def multiply(w: Any, x: Any, scales: Any, num_rows: int, out: Any, after: Any) -> None:
    """out += x times w [lines, numbers], for num_rows rows and what is left of their last tile.

    Each tile asks for its share of `after`, which is as long as w, or empty.
    """
    num_lines, is_grouped = w.shape[0], scales.shape[1] > 1
    apart = after.size * after.itemsize // (num_tiles(num_rows) * num_lines)
    at_once = GROUP // 2 if is_grouped else num_lines if HAS_512 else _LINES
    base = np.int64(after.ctypes.data)
    for first in range(0, num_lines, at_once):
        count = min(at_once, num_lines - first)
        span = first, count, first // at_once if is_grouped else 0, apart
        base = _take(w, (x, scales, out), num_rows, span, (base, count * apart))


@njit
def _widen(x: Any, wide: Any, scales: Any) -> None:
    for m in range(x.shape[0]):
        row, target = x[m], wide[m]
        for k in range(row.size):
            target[k] = widen(row[k])


@njit
def _to_bf16(x: Any, target: Any, scales: Any) -> None:
    """Copies bfloat16 bits, or int8 numbers, which are exact in bfloat16."""
    for m in range(x.shape[0]):
        source, row = x[m], target[m]
        for k in range(source.size):
            row[k] = narrow(widen(source[k]), row[0])


@njit
def to_int16(x: Any, by: Any, target: Any) -> None:
    for k in range(x.size):
        target[k] = np.int16(np.rint(widen(x[k]) * by))


@njit
def _quantize(x: Any, wide: Any, scales: Any) -> None:
    """Rows as int16 and a scale for each of their groups."""
    for m in range(x.shape[0]):
        for group in range(scales.shape[1]):
            span = slice(group * GROUP, (group + 1) * GROUP)
            largest = largest_size(x[m, span])
            scales[m, group] = largest / _INT16_MAX
            by = _INT16_MAX / largest if largest > 0 else np.float32(0)
            to_int16(x[m, span], by, wide[m, span])


@njit
def _quantize_bytes(x: Any, wide: Any, scales: Any) -> None:
    _quantize(x, wide, scales)
    for m in range(x.shape[0]):
        split(wide[m], x.shape[1])


@njit
def put(out: Any, num_rows: int, target: Any, row: int, first: int) -> None:
    """Sums of a panel to y [rows, outputs] from `row` on and output `first` on, as far as it goes.

    Whole rows of y are known to be contiguous; of a part of it the compiler would not know.
    """
    y, scale, bias = target
    stop = min(first + PANEL, y.shape[1])
    own_scale, own_bias = scale[first:stop], bias[first:stop]
    for m in range(num_rows):
        sums, place = out[m], y[row + m, first:stop]
        for n in range(place.size):
            place[n] = narrow(sums[n] * own_scale[n] + own_bias[n], place[0])


@njit
def _no_scales(panel: Any, num_inputs: int) -> Any:
    return 1


@njit
def _one_by_group(panel: Any, num_inputs: int) -> Any:
    return (num_inputs + GROUP - 1) // GROUP


class Way(NamedTuple):
    """How rows meet panels: `take_in` brings them to `dtype`, with numbers of their own.

    There are `num_scales` of these a row. `name` is its own.
    """

    name: str
    take_in: Any
    multiply: Any
    dtype: Any
    num_scales: Any


def product_by(way: Way) -> Any:
    name, take_in, multiply, dtype, num_scales = way
    num_bytes = np.dtype(dtype).itemsize
    apart = CACHE_LINE // num_bytes  # rows a power of two apart would meet in the first cache

    @compiled_as(name)
    def product_rows(counter: Any, w: Any, x: Any, target: Any) -> None:
        """Pieces, a panel for a block of rows each, until none is left.

        w [panels, lines, numbers]; target: y [rows, outputs], scale and bias by output.
        """
        num_panels, (num_rows, num_inputs) = w.shape[0], x.shape
        size = min(num_rows, max(BLOCK_BYTES // (num_bytes * num_inputs) // MANY, 1) * MANY)
        num_pieces = (num_rows + size - 1) // size * num_panels
        padded = reached(size)
        wide = empty_rows(padded, num_inputs + apart, dtype)
        wide[size:], wide[:, num_inputs:] = 0, 0
        scales = np.ones((padded, num_scales(w[0], num_inputs)), np.float32)
        out = empty_rows(padded, PANEL, np.float32)
        block = -1
        piece: int = take_next(counter)
        while piece < num_pieces:
            following: int = take_next(counter)
            if block != piece // num_panels:
                block = piece // num_panels
                rows = x[block * size : (block + 1) * size]
                take_in(rows, wide, scales)
            panel, out[:] = w[piece % num_panels], 0
            after = w[following % num_panels if following < num_pieces else num_panels :][:1]
            multiply(panel, wide, scales, rows.shape[0], out, after)
            put(out, rows.shape[0], target, block * size, piece % num_panels * PANEL)
            piece = following

    return product_rows


BF16 = Way("bf16", _widen, multiply, np.float32, _no_scales)
BF16_DOT = Way("bf16_dot", _to_bf16, multiply, np.uint16, _no_scales)
INT8 = Way("int8", _quantize, multiply, np.int16, _one_by_group)
_INT8_AMX = Way("int8_amx", _quantize_bytes, multiply_bytes, np.int16, _one_by_group)
_by_bf16, _by_bf16_dot = product_by(BF16), product_by(BF16_DOT)
_by_int8, _by_int8_amx = product_by(INT8), product_by(_INT8_AMX)


@njit
def _multiply_amx(panel: Any, x: Any, state: Any, fetching: Any, target: Any) -> None:
    """Two tiles of rows after another, each put to y, scaled, as soon as it is summed."""
    table, steps, out = state
    there, num_lines = fetching
    y, first_row, output = target
    for row in range(0, x.shape[0], _AMX_ROWS):
        left = min(x.shape[0] - row, _AMX_ROWS)
        if row == 0 or left < _AMX_ROWS:
            configure(table, min(left, TILE), max(left - TILE, 0))
        at = (0, 0, 0, _LINE_BYTES, there, num_lines)
        if left > TILE:
            _amx_2(x[row:], panel, steps, out, at)
        else:
            _amx_1(x[row:], panel, steps, out, at)
        there += steps.size * num_lines * CACHE_LINE
        put(out, left, y, first_row + row, output)


@njit
def _rows_by_bf16_amx(counter: Any, w: Any, x: Any, target: Any) -> None:
    """The same as without AMX; rows are multiplied as they are, only further apart.

    The number of inputs must be a multiple of DEEP.
    """
    num_panels, (num_rows, num_inputs) = w.shape[0], x.shape
    size = max(BLOCK_BYTES // (2 * num_inputs) // _AMX_ROWS, 1) * _AMX_ROWS
    size = min(size, num_rows)
    num_pieces = (num_rows + size - 1) // size * num_panels
    steps = np.arange(num_inputs // DEEP) * _STEP_BYTES
    state = np.zeros(64, np.uint8), steps, empty_rows(_AMX_ROWS, PANEL, np.float32)
    apart = empty_rows(size, num_inputs + DEEP, np.uint16)
    num_tiles = (size + _AMX_ROWS - 1) // _AMX_ROWS
    share = max(w[0].size * w.itemsize // (steps.size * num_tiles * CACHE_LINE), 1)
    held = -1
    piece: int = take_next(counter)
    while piece < num_pieces:
        following: int = take_next(counter)
        panel, block = piece % num_panels, piece // num_panels
        rows = slice(block * size, min(block * size + size, num_rows))
        if held != block:
            held = block
            _to_bf16(x[rows], apart, None)
        fetching = np.int64(w[following % num_panels].ctypes.data), share
        own = target, rows.start, panel * PANEL
        used = apart[: rows.stop - rows.start]
        _multiply_amx(w[panel], used, state, fetching, own)
        piece = following
    release()


class _Product(NamedTuple):
    rows: int
    outputs: int
    inputs: int
    weight: int
    x: int
    y: int
    scale: int
    bias: int
    groups: int  # or lines
    group_bytes: int


read_product = reader(_Product)


@njit
def scale_and_bias(g: Any) -> Any:
    return carray(f32_at(g.scale), g.outputs), carray(f32_at(g.bias), g.outputs)


@njit
def _panels(bits: Any, num_outputs: int, num_inputs: int) -> Any:
    return carray(bits, ((num_outputs + PANEL - 1) // PANEL, (num_inputs + 1) // 2, 2 * PANEL))


@Kernel
def _bf16_by_bf16(a: Any) -> None:
    g = read_product(a)
    w, y = _panels(u16_at(g.weight), g.outputs, g.inputs), carray(u16_at(g.y), (g.rows, g.outputs))
    _by_bf16(a, w, carray(u16_at(g.x), (g.rows, g.inputs)), (y, *scale_and_bias(g)))


@Kernel
def _bf16_dot(a: Any) -> None:
    g = read_product(a)
    w, y = _panels(u16_at(g.weight), g.outputs, g.inputs), carray(u16_at(g.y), (g.rows, g.outputs))
    _by_bf16_dot(a, w, carray(u16_at(g.x), (g.rows, g.inputs)), (y, *scale_and_bias(g)))


@Kernel
def _bf16_amx(a: Any) -> None:
    g = read_product(a)
    w, y = _panels(u16_at(g.weight), g.outputs, g.inputs), carray(u16_at(g.y), (g.rows, g.outputs))
    _rows_by_bf16_amx(a, w, carray(u16_at(g.x), (g.rows, g.inputs)), (y, *scale_and_bias(g)))


@Kernel
def _bf16_by_int8(a: Any) -> None:
    g = read_product(a)
    w, y = _panels(i8_at(g.weight), g.outputs, g.inputs), carray(u16_at(g.y), (g.rows, g.outputs))
    _by_int8(a, w, carray(u16_at(g.x), (g.rows, g.inputs)), (y, *scale_and_bias(g)))


@Kernel
def _bf16_by_int8_or_amx(a: Any) -> None:
    g = read_product(a)
    w, y = _panels(i8_at(g.weight), g.outputs, g.inputs), carray(u16_at(g.y), (g.rows, g.outputs))
    x, target = carray(u16_at(g.x), (g.rows, g.inputs)), (y, *scale_and_bias(g))
    if g.rows > _FEW_ROWS:
        _by_int8_amx(a, w, x, target)
    else:
        _by_int8(a, w, x, target)


@Kernel
def _float_by_int8(a: Any) -> None:
    g = read_product(a)
    w, y = _panels(i8_at(g.weight), g.outputs, g.inputs), carray(f32_at(g.y), (g.rows, g.outputs))
    _by_int8(a, w, carray(f32_at(g.x), (g.rows, g.inputs)), (y, *scale_and_bias(g)))


BF16_BY_BF16, BF16_DOT_KERNEL, BF16_BY_INT8 = _bf16_by_bf16, _bf16_dot, _bf16_by_int8
FLOAT_BY_INT8 = _float_by_int8
_BODIES = {
    (torch.bfloat16, torch.bfloat16): _bf16_by_bf16,
    (torch.bfloat16, torch.int8): _bf16_by_int8,
    (torch.float32, torch.int8): _float_by_int8,
}
_BODIES_DOT = _BODIES | {(torch.bfloat16, torch.bfloat16): _bf16_dot}
_BODIES_AMX = _BODIES | {
    (torch.bfloat16, torch.bfloat16): _bf16_amx,
    (torch.bfloat16, torch.int8): _bf16_by_int8_or_amx,
}


def kernels_for(
    instructions: InstructionSet | None, num_inputs: int, weight: torch.dtype
) -> Kernels:
    """Kernels by the type of the rows; default `instructions`: the processor's best."""
    instructions, bodies = instructions or instruction_sets_here()[0], _BODIES
    if instructions == "amx" and num_inputs % (GROUP if weight == torch.int8 else DEEP) == 0:
        bodies = _BODIES_AMX
    elif instructions == "bf16dot":
        bodies = _BODIES_DOT
    return {x: kernel for (x, w), kernel in bodies.items() if w == weight}


def pack(weight: Tensor) -> Tensor:
    """weight [outputs, inputs], bfloat16 or int8, as [panels, pairs of inputs, PANEL, 2].

    Outputs and inputs that are not there are zero.
    """
    outputs, inputs = weight.shape
    whole = F.pad(weight, (0, inputs % 2, 0, -outputs % PANEL))
    return whole.view(-1, PANEL, whole.shape[1] // 2, 2).transpose(1, 2).contiguous()


def num_packed(num_outputs: int, num_inputs: int) -> int:
    """Numbers of a packed matrix, with the zeros."""
    return (num_outputs + -num_outputs % PANEL) * (num_inputs + num_inputs % 2)


class Operand:
    """A packed matrix with a float32 scale and bias per output, as addresses.

    Looking them up anew at every call would cost more than a small product.
    """

    def __init__(
        self, packed: Tensor, num_inputs: int, scale: Tensor, bias: Tensor, kernels: Kernels
    ) -> None:
        self.num_outputs, self.num_inputs = len(scale), num_inputs
        self.weight = packed.data_ptr()
        self.further = scale.data_ptr(), bias.data_ptr(), *packed.shape[1:3]
        self.kernels = kernels
        self._held = packed, scale, bias


def product(x: Tensor, by: Operand) -> Tensor:
    """x [rows, inputs] times the transpose of `by`.

    Sums are float32, rounded once to x's dtype.
    """
    x = x.contiguous()
    rows = x.shape[0]
    y = torch.empty((rows, by.num_outputs), dtype=x.dtype)
    sizes, pointers = (rows, by.num_outputs, by.num_inputs), (x.data_ptr(), y.data_ptr())
    words = _Product(*sizes, by.weight, *pointers, *by.further)
    parallel(by.kernels[x.dtype], arguments_of(*words))
    return y
