"""Multiplies rows with a packed matrix, for one row as well as for thousands of rows.

Weights are packed once, in panels of 32 outputs. The weights of one input are side by side, so a
panel is read from memory in one sequential pass, and a vector holds 16 outputs. Each vector of
weights is widened in registers and multiplied with one number of each of up to 12 rows. AMX takes
bfloat16 panels unchanged. The sums of a row do not depend on the other rows.

int8 weights are multiplied with integers: the inputs of a row are scaled to int16 in groups of
128, and each group is summed exactly. For all numbers down to a hundredth of a group's largest
number, int16 is more precise than bfloat16.
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
from headrace_kernels.launch import Kernel, kernel_named, parallel
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
from headrace_kernels.registers import HAS_512, MAX_TILE_ROWS, padded_rows
from headrace_kernels.tiles import (
    CACHE_LINE,
    PANEL,
    empty_rows,
    num_tiles,
    over_panel,
    panel_tile,
)

# On processors whose tiles have few rows, this number of lines of a panel is multiplied with all
# rows before the next lines. So the lines stay in the L1 cache.
_LINES = 128
# The size of a block of widened rows, in bytes. The block stays in the L2 cache.
BLOCK_BYTES = (600 if HAS_512 else 300) << 10
Kernels = Mapping[torch.dtype, Kernel]
_INT16_MAX = np.float32(32767)
_amx_2, _amx_1 = amx_tile(2, False), amx_tile(1, False)
# The bytes of a line of a panel: the bfloat16 weights of two inputs for each output.
_LINE_BYTES = 4 * PANEL
_STEP_BYTES = TILE * _LINE_BYTES
_AMX_ROWS = 2 * TILE  # number of rows at a time
# Up to this number of rows, reordering the weights for AMX costs more than it saves.
_FEW_ROWS = 16


_take = over_panel("product", panel_tile)


@njit
def multiply(w: Any, x: Any, scales: Any, num_rows: int, out: Any, after: Any) -> None:
    """Add the product of x and w [lines, numbers] to `out`.

    The rows from num_rows to the end of the last tile are also computed. `after` is as long as w,
    or empty. Each tile prefetches a part of `after`.
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
    """Copy rows as bfloat16 bits. int8 numbers are exact in bfloat16."""
    for m in range(x.shape[0]):
        source, row = x[m], target[m]
        for k in range(source.size):
            row[k] = narrow(widen(source[k]), row[0])


@njit
def to_integers(x: Any, by: Any, target: Any) -> None:
    for k in range(x.size):
        target[k] = np.int16(np.rint(widen(x[k]) * by))


@njit
def _quantize(x: Any, wide: Any, scales: Any) -> None:
    """Convert rows to int16, with a scale for each group of inputs."""
    for m in range(x.shape[0]):
        for group in range(scales.shape[1]):
            span = slice(group * GROUP, (group + 1) * GROUP)
            largest = largest_size(x[m, span])
            scales[m, group] = largest / _INT16_MAX
            by = _INT16_MAX / largest if largest > 0 else np.float32(0)
            to_integers(x[m, span], by, wide[m, span])


@njit
def _quantize_bytes(x: Any, wide: Any, scales: Any) -> None:
    _quantize(x, wide, scales)
    for m in range(x.shape[0]):
        split(wide[m], x.shape[1])


@njit
def put(out: Any, num_rows: int, target: Any, row: int, first: int) -> None:
    """Scale the sums of a panel, add the bias and write the results to y [rows, outputs].

    row, first: the first row and the first output to write in y. Outputs past the end of y are
    dropped. All of y is passed, because the compiler could not know that a slice of y is
    contiguous.
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


class ProductMethod(NamedTuple):
    """A method to multiply rows with panels of one weight format.

    take_in: converts rows to `dtype` and stores `num_scales` scales for each row.
    multiply: adds the product with one panel.
    name: a unique name, because the functions made from the method are named after it.
    """

    name: str
    take_in: Any
    multiply: Any
    dtype: Any
    num_scales: Any


def product_by(method: ProductMethod) -> Any:
    name, take_in, multiply, dtype, num_scales = method
    num_bytes = np.dtype(dtype).itemsize
    # If the distance of two rows were a power of two, the rows would compete for the same lines of
    # the L1 cache. So a gap of one cache line follows each row.
    apart = CACHE_LINE // num_bytes

    @compiled_as(name)
    def product_rows(counter: Any, w: Any, x: Any, target: Any) -> None:
        """Take pieces until none is left; each piece is a panel for a block of rows.

        Reading the weights takes most of the time, so the computation should never wait for
        weights. Each thread takes its next piece before it computes the current piece. The tiles
        of the current piece prefetch the panel of the next piece. A block of rows is widened once
        and stays in the L2 cache while panel after panel is multiplied with it.

        w: [panels, lines, numbers]. target: y [rows, outputs], scale and bias by output.
        """
        num_panels, (num_rows, num_inputs) = w.shape[0], x.shape
        size = min(
            num_rows,
            max(BLOCK_BYTES // (num_bytes * num_inputs) // MAX_TILE_ROWS, 1) * MAX_TILE_ROWS,
        )
        num_pieces = (num_rows + size - 1) // size * num_panels
        padded = padded_rows(size)
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


BF16 = ProductMethod("bf16", _widen, multiply, np.float32, _no_scales)
BF16_DOT = ProductMethod("bf16_dot", _to_bf16, multiply, np.uint16, _no_scales)
INT8 = ProductMethod("int8", _quantize, multiply, np.int16, _one_by_group)
_INT8_AMX = ProductMethod("int8_amx", _quantize_bytes, multiply_bytes, np.int16, _one_by_group)


@njit
def _multiply_amx(panel: Any, x: Any, state: Any, fetching: Any, target: Any) -> None:
    """Multiply with two tiles of rows at a time; scale and write the tiles' sums immediately."""
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
    """Compute the same as without AMX. Rows keep the bfloat16 format and are only moved apart.

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
    # The number of groups of a panel; in formats without groups, the number of lines of a panel.
    groups: int
    group_bytes: int


read_product = reader(_Product)


@njit
def num_panels(g: Any) -> int:
    return (g.outputs + PANEL - 1) // PANEL


@njit
def panels_bf16(g: Any, address: int) -> Any:
    return carray(u16_at(address), (num_panels(g), (g.inputs + 1) // 2, 2 * PANEL))


@njit
def panels_int8(g: Any, address: int) -> Any:
    return carray(i8_at(address), (num_panels(g), (g.inputs + 1) // 2, 2 * PANEL))


def product_kernel(name: str, at: Any, panels_of: Any, products: Any) -> Kernel:
    """Make the kernel of one matrix.

    at: turns an address into a pointer to numbers of x and y.
    panels_of: turns the address of the weights into a matrix [panels, lines, numbers].
    products: made by `product_by`.
    """

    def product(a: Any) -> None:
        g = read_product(a)
        x, y = carray(at(g.x), (g.rows, g.inputs)), carray(at(g.y), (g.rows, g.outputs))
        target = y, carray(f32_at(g.scale), g.outputs), carray(f32_at(g.bias), g.outputs)
        products(a, panels_of(g, g.weight), x, target)

    return kernel_named(name, product)


def few_or_many(name: str, few: Any, many: Any) -> Any:
    """Return a product that calls `few` for up to _FEW_ROWS rows, and `many` for more rows.

    `many` uses AMX.
    """

    @compiled_as(name)
    def products(counter: Any, w: Any, x: Any, target: Any) -> None:
        if x.shape[0] > _FEW_ROWS:
            many(counter, w, x, target)
        else:
            few(counter, w, x, target)

    return products


_by_int8 = product_by(INT8)
_by_int8_or_amx = few_or_many("int8_or_amx", _by_int8, product_by(_INT8_AMX))
BF16_BY_BF16 = product_kernel("bf16_by_bf16", u16_at, panels_bf16, product_by(BF16))
BF16_BY_BF16_DOT = product_kernel("bf16_dot", u16_at, panels_bf16, product_by(BF16_DOT))
BF16_BY_BF16_AMX = product_kernel("bf16_amx", u16_at, panels_bf16, _rows_by_bf16_amx)
BF16_BY_INT8 = product_kernel("bf16_by_int8", u16_at, panels_int8, _by_int8)
FLOAT_BY_INT8 = product_kernel("float_by_int8", f32_at, panels_int8, _by_int8)
_BODIES = {
    (torch.bfloat16, torch.bfloat16): BF16_BY_BF16,
    (torch.bfloat16, torch.int8): BF16_BY_INT8,
    (torch.float32, torch.int8): FLOAT_BY_INT8,
}
_BODIES_DOT = _BODIES | {(torch.bfloat16, torch.bfloat16): BF16_BY_BF16_DOT}
_BODIES_AMX = _BODIES | {
    (torch.bfloat16, torch.bfloat16): BF16_BY_BF16_AMX,
    (torch.bfloat16, torch.int8): product_kernel(
        "bf16_by_int8_or_amx", u16_at, panels_int8, _by_int8_or_amx
    ),
}


def kernels_for(
    instructions: InstructionSet | None, num_inputs: int, weight: torch.dtype
) -> Kernels:
    """Return the kernels by the dtype of the rows.

    By default, the kernels are those for the processor's best instruction set.
    """
    instructions, bodies = instructions or instruction_sets_here()[0], _BODIES
    if instructions == "amx" and num_inputs % (GROUP if weight == torch.int8 else DEEP) == 0:
        bodies = _BODIES_AMX
    elif instructions == "bf16dot":
        bodies = _BODIES_DOT
    return {x: kernel for (x, w), kernel in bodies.items() if w == weight}


def pack(weight: Tensor) -> Tensor:
    """Pack weight [outputs, inputs], bfloat16 or int8, as [panels, pairs of inputs, PANEL, 2].

    Missing outputs and inputs are filled with zeros.
    """
    outputs, inputs = weight.shape
    whole = F.pad(weight, (0, inputs % 2, 0, -outputs % PANEL))
    return whole.view(-1, PANEL, whole.shape[1] // 2, 2).transpose(1, 2).contiguous()


def num_packed(num_outputs: int, num_inputs: int) -> int:
    """Return how many numbers a packed matrix has, including the zeros that `pack` adds."""
    return (num_outputs + -num_outputs % PANEL) * (num_inputs + num_inputs % 2)


class Operand:
    """A packed matrix with a float32 scale and bias for each output, as addresses.

    Reading the addresses from the tensors at every call would take longer than a small product.
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
    """Return x [rows, inputs] times the transpose of `by`.

    Sums are float32 and are rounded once to the dtype of x.
    """
    x = x.contiguous()
    rows = x.shape[0]
    y = torch.empty((rows, by.num_outputs), dtype=x.dtype)
    sizes, pointers = (rows, by.num_outputs, by.num_inputs), (x.data_ptr(), y.data_ptr())
    words = _Product(*sizes, by.weight, *pointers, *by.further)
    parallel(by.kernels[x.dtype], arguments_of(*words))
    return y
