"""Packs weights in groups of inputs and multiplies with them.

Each output has a scale, and possibly a minimum, for each group. A weight is scale * q + minimum.
An MXFP4 weight is a scale times a 4-bit float (fp4.py). Like all packed weights, a panel has 32
outputs. A group is stored as its scales, its minima and then the q's in lines of two or four
inputs. So all data of a group is contiguous, and a panel is read from memory in one sequential
pass.

Rows are converted to int16 with a scale for each of the same groups. For all numbers down to a
hundredth of a group's largest number, int16 is more precise than bfloat16. On AVX2, rows are
converted to bytes if the weights have 4 bits (except MXFP4): products of bytes are faster, and
their error is small beside the error of the weights. The sums inside a group are exact and groups
are added in order, so a row's result does not depend on other rows.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numba import njit
from numba.np.numpy_support import carray
from torch import Tensor

from headrace_kernels.amx_groups import multiply_groups
from headrace_kernels.amx_int8 import split
from headrace_kernels.group_tile import WIDE, GroupFormat, group_layout, group_tile
from headrace_kernels.instruction_sets import InstructionSet, instruction_sets_here
from headrace_kernels.launch import Kernel
from headrace_kernels.numeric import compiled_as, f32_at, i8_at, largest_size, u16_at
from headrace_kernels.product import (
    ProductMethod,
    few_or_many,
    num_panels,
    product_by,
    product_kernel,
    to_integers,
)
from headrace_kernels.registers import HAS_512, MAX_TILE_ROWS
from headrace_kernels.tiles import (
    CACHE_LINE,
    PANEL,
    empty_rows,
    num_tiles,
    over_halves,
    over_pair,
    over_panel,
)


class Scheme(NamedTuple):
    """How grouped values are stored: unsigned 4 bits with minima, or signed 8 bits.

    8-bit values may have minima. If `is_float` is true, the values are MXFP4: codes of 4-bit
    floats, and a scale of one byte.
    """

    bits: int
    size: int  # number of neighbouring inputs in a group
    has_minimum: bool
    is_float: bool = False

    @property
    def form(self) -> GroupFormat:
        return GroupFormat(self.bits, self.has_minimum, self.is_float)


class GroupedWeights(NamedTuple):
    """A matrix in groups: q int8 [outputs, inputs]; scale and minimum float16 [outputs, groups].

    In MXFP4, the scales are uint8 and there are no minima.
    """

    scheme: Scheme
    q: Tensor
    scale: Tensor
    minimum: Tensor


INT4 = Scheme(4, 32, True)
"""The scheme to which `--quantize int4` rounds weights."""
MXFP4 = Scheme(4, 32, has_minimum=False, is_float=True)

_PANELS_AT_ONCE = 32  # number of panels packed at a time
_ROWS_AT_ONCE = 256  # number of rows widened to float32 at a time
_SMALLEST = 2**-24  # smallest positive float16
# How many groups are widened at a time. The widened groups stay in the L1 cache while all rows
# are multiplied.
_GROUPS = 8
# Up to this number of rows, each tile widens the weights itself, because a separate pass would
# cost more.
_FEW_TO_LAY_OUT = 4


def group_bytes(scheme: Scheme) -> int:
    """Return the bytes of one group of a panel."""
    return scheme.form.head_bytes + PANEL * scheme.size * scheme.bits // 8


def packed_bytes(scheme: Scheme, outputs: int, inputs: int) -> int:
    return -(-outputs // PANEL) * -(-inputs // scheme.size) * group_bytes(scheme)


def pack_groups(groups: GroupedWeights) -> Tensor:
    """Return the weights as bytes [panels, groups, bytes of a group].

    Missing outputs and inputs are filled with zeros.
    """
    scheme, (outputs, inputs) = groups.scheme, groups.q.shape
    each = scheme.form.line_inputs
    num_panels, num_groups = -(-outputs // PANEL), -(-inputs // scheme.size)
    packed = torch.empty(num_panels, num_groups, group_bytes(scheme), dtype=torch.int8)
    for first in range(0, num_panels, _PANELS_AT_ONCE):
        target = packed[first : first + _PANELS_AT_ONCE]
        rows = slice(first * PANEL, (first + len(target)) * PANEL)
        missing = max(rows.stop - outputs, 0)
        q = F.pad(groups.q[rows], (0, num_groups * scheme.size - inputs, 0, missing))
        q = q.view(len(target), PANEL, num_groups, -1, each).permute(0, 2, 3, 1, 4)
        q = q.reshape(len(target), num_groups, -1, each * PANEL)
        if scheme.form.has_byte_rows:
            q = q[:, :, ::2] | q[:, :, 1::2] << 4
        elif scheme.bits == 4:
            q = q[..., : each * PANEL // 2] | q[..., each * PANEL // 2 :] << 4
        numbers = [groups.scale, groups.minimum] if scheme.has_minimum else [groups.scale]
        place = 0
        for number in numbers:
            own = F.pad(number[rows], (0, 0, 0, missing)).view(len(target), PANEL, num_groups)
            size = PANEL * number.itemsize
            target[..., place : place + size] = own.transpose(1, 2).contiguous().view(torch.int8)
            place += size
        target[..., place:] = q.flatten(2)
    return packed


def quantize_groups(weight: Tensor, scheme: Scheme = INT4) -> GroupedWeights:
    """Quantize weights to equal steps between each group's minimum and maximum.

    A weight is rounded to the nearest step. The minimum is at most 0 and the maximum at least 0.
    """
    outputs, inputs = weight.shape
    num_groups = -(-inputs // scheme.size)
    q = torch.empty((outputs, inputs), dtype=torch.int8)
    scale, minimum = (torch.empty(outputs, num_groups, dtype=torch.float16) for _ in range(2))
    for first in range(0, outputs, _ROWS_AT_ONCE):
        part = slice(first, first + _ROWS_AT_ONCE)
        wide = F.pad(weight.detach()[part].float(), (0, num_groups * scheme.size - inputs))
        wide = wide.unflatten(1, (num_groups, scheme.size))
        low, high = wide.amin(2).clamp_(max=0), wide.amax(2).clamp_(min=0)
        minimum[part] = low
        scale[part] = (high - minimum[part].float()) / (2**scheme.bits - 1)
        step = scale[part].float().clamp(min=_SMALLEST)[..., None]
        steps = ((wide - minimum[part].float()[..., None]) / step).round_()
        q[part] = steps.clamp_(0, 2**scheme.bits - 1).flatten(1)[:, :inputs]
    return GroupedWeights(scheme, q, scale, minimum)


@njit
def _scale_and_sum(panel: Any, num_inputs: int) -> Any:
    return 2 * panel.shape[0]


@njit
def _quantize(x: Any, wide: Any, scales: Any) -> None:
    """Convert rows to integers. Store the scale and the scaled sum of each group in `scales`.

    wide: int16 or int8; int8 for the formats whose rows are bytes.
    """
    num_groups, most = scales.shape[1] // 2, np.float32(2 ** (8 * wide.itemsize - 1) - 1)
    # Groups have 32 or 16 inputs. A single group of 32 with at most 16 inputs is treated as a
    # group of 16, which gives the same result.
    size = 32 if x.shape[1] > 16 * num_groups else 16
    for m in range(x.shape[0]):
        for group in range(num_groups):
            span = slice(group * size, (group + 1) * size)
            largest = largest_size(x[m, span])
            scale = largest / most
            to_integers(x[m, span], most / largest if largest > 0 else scale, wide[m, span])
            whole = np.int32(0)
            for k in range(group * size, (group + 1) * size):
                whole = np.int32(whole + wide[m, k])
            scales[m, 2 * group] = scale
            scales[m, 2 * group + 1] = scale * np.float32(whole)


@njit
def _quantize_bytes(x: Any, wide: Any, scales: Any) -> None:
    _quantize(x, wide, scales)
    for m in range(x.shape[0]):
        split(wide[m], x.shape[1])


def _product_amx(bits: int, has_minimum: bool) -> Any:
    name = f"amx_groups_{bits}{'_and_minimum' if has_minimum else ''}"
    multiply = multiply_groups(name, bits, has_minimum)
    return product_by(ProductMethod(name, _quantize_bytes, multiply, np.int16, _scale_and_sum))


def _method_of(form: GroupFormat) -> ProductMethod:
    made = _multiply if HAS_512 or form.has_byte_rows else _multiply_laid_out
    dtype = np.int8 if form.has_byte_rows else np.int16
    return ProductMethod(form.name, _quantize, made(form.name, form), dtype, _scale_and_sum)


def _tiles(form: GroupFormat) -> Any:
    def tile_of(num_rows: int, num_vectors: int) -> Any:
        return group_tile(num_rows, num_vectors, form)

    return tile_of


def _multiply(name: str, form: GroupFormat) -> Any:
    take = over_panel(name, _tiles(form))
    head, line_bytes = form.head_bytes, form.line_bytes

    @compiled_as(name)
    def multiply(w: Any, x: Any, scales: Any, num_rows: int, out: Any, after: Any) -> None:
        """Add the product of x and w [groups, bytes] to `out`, as `product.multiply` does."""
        num_groups, num_lines = w.shape[0], (w.shape[1] - head) // line_bytes
        all_tiles = num_groups * num_tiles(num_rows)
        share = (after.size + all_tiles - 1) // all_tiles
        span, base = (0, num_groups, num_lines, share), np.int64(after.ctypes.data)
        take(w, (x, scales, out), num_rows, span, (base, num_groups * share))

    return multiply


def _multiply_laid_out(name: str, form: GroupFormat) -> Any:
    has_minimum = form.has_minimum
    packed, wide = _tiles(form), _tiles(GroupFormat(WIDE, has_minimum))
    take_pair, take_few = over_pair(name, packed), over_halves(name, packed, _FEW_TO_LAY_OUT)
    take_many, lay_out = over_halves(f"{name}_wide", wide, MAX_TILE_ROWS), group_layout(form)
    head, line_bytes = form.head_bytes, form.line_bytes

    @compiled_as(name)
    def multiply(w: Any, x: Any, scales: Any, num_rows: int, out: Any, after: Any) -> None:
        """Add the product of x and w to `out`, as `product.multiply` does.

        With more than a few rows, weights are widened only once. In this case, _GROUPS groups at a
        time are widened into `room` and multiplied with all rows.
        """
        num_groups, num_lines = w.shape[0], (w.shape[1] - head) // line_bytes
        size, base = 2 * num_lines, np.int64(after.ctypes.data)
        all_tiles = num_groups * (num_tiles(num_rows) if num_rows <= _FEW_TO_LAY_OUT else 1)
        share = (after.size + all_tiles - 1) // all_tiles
        if num_rows <= _FEW_TO_LAY_OUT:
            rows, span = (x, scales, out), (0, num_groups, num_lines, share)
            if num_rows <= 2:
                take_pair(w, rows, num_rows, span, (base, num_groups * share))
            else:
                take_few(w, rows, num_rows, span, (base, num_groups * share))
            return
        half = CACHE_LINE * (1 + has_minimum + num_lines)
        room = empty_rows(_GROUPS, 2 * half, np.int8)
        for first in range(0, num_groups, _GROUPS):
            count = min(_GROUPS, num_groups - first)
            for place in range(count):
                group = first + place
                lay_out(w, room, (group, place, num_lines, share, base + group * share))
            rows = x[:, first * size :], scales[:, 2 * first :], out
            take_many(room, rows, num_rows, (0, count, num_lines, 0), (0, 0))

    return multiply


BY_4, BY_8, BY_8_AND_MINIMUM = map(
    _method_of, (GroupFormat(4, True), GroupFormat(8, False), GroupFormat(8, True))
)
BY_MXFP4 = _method_of(MXFP4.form)


@njit
def panels_in_groups(g: Any, address: int) -> Any:
    return carray(i8_at(address), (num_panels(g), g.groups, g.group_bytes))


def _kernel(name: str, products: Any, at: Any = u16_at) -> Kernel:
    return product_kernel(name, at, panels_in_groups, products)


_by_4, _by_8, _by_8_and_minimum = map(product_by, (BY_4, BY_8, BY_8_AND_MINIMUM))
BF16_BY_4, FLOAT_BY_4 = _kernel("bf16_by_4", _by_4), _kernel("float_by_4", _by_4, f32_at)
BF16_BY_8 = _kernel("bf16_by_8", _by_8)
BF16_BY_8_AND_MINIMUM = _kernel("bf16_by_8_and_minimum", _by_8_and_minimum)
BF16_BY_MXFP4 = _kernel("bf16_by_mxfp4", product_by(BY_MXFP4))
# Only weights that `--quantize int4` has rounded are multiplied with float32 rows.
_KERNELS = {
    GroupFormat(4, True): {torch.bfloat16: BF16_BY_4, torch.float32: FLOAT_BY_4},
    GroupFormat(8, False): {torch.bfloat16: BF16_BY_8},
    GroupFormat(8, True): {torch.bfloat16: BF16_BY_8_AND_MINIMUM},
    MXFP4.form: {torch.bfloat16: BF16_BY_MXFP4},
}


def _kernel_amx(form: GroupFormat, few: Any) -> Kernel:
    many = _product_amx(form.bits, form.has_minimum)
    return _kernel(f"bf16_by_{form.name}_or_amx", few_or_many(f"{form.name}_or_amx", few, many))


# MXFP4 has no kernel for AMX and uses the kernels with vectors.
_KERNELS_AMX = {
    GroupFormat(4, True): _kernel_amx(GroupFormat(4, True), _by_4),
    GroupFormat(8, False): _kernel_amx(GroupFormat(8, False), _by_8),
    GroupFormat(8, True): _kernel_amx(GroupFormat(8, True), _by_8_and_minimum),
}


def kernels_of(
    scheme: Scheme, num_inputs: int, instructions: InstructionSet | None = None
) -> dict[torch.dtype, Kernel]:
    """Return the kernels by the dtype of the rows.

    By default, the kernels are those for the processor's best instruction set.
    """
    kernels, by_amx = _KERNELS[scheme.form], _KERNELS_AMX.get(scheme.form)
    is_amx = (instructions or instruction_sets_here()[0]) == "amx"
    if by_amx and is_amx and num_inputs % scheme.size == 0:
        return kernels | {torch.bfloat16: by_amx}
    return kernels
