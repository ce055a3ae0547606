"""Owns weights in groups of inputs, each with a scale and maybe a minimum for each output.

A weight is scale * q + minimum; in MXFP4 it is a scale times a number of four bits (fp4.py).
Panels have 32 outputs, as all packed weights have. A group is its scales, its minima, and then the
q's as lines of two inputs: what a product needs of a group lies in one stretch, and a panel streams
from memory in one go.

Rows meet them as int16, scaled by the same groups, which is finer than bfloat16 for all that is
within a hundredth of a group's largest. Sums within a group are exact, and groups are added in
order, so a row's result is the same whatever rows are with it.
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
from headrace_kernels.group_tile import WIDE, Form, group_layout, group_tile
from headrace_kernels.instruction_sets import InstructionSet, instruction_sets_here
from headrace_kernels.launch import Kernel
from headrace_kernels.numeric import compiled_as, f32_at, i8_at, largest_size, u16_at
from headrace_kernels.product import Way, product_by, read_product, scale_and_bias, to_int16
from headrace_kernels.registers import HAS_512, MANY
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
    """How groups hold values: 4 bits a value, from 0 on and with minima, or 8, signed.

    Or as MXFP4 does: codes of numbers of 4 bits, and scales in a byte.
    """

    bits: int
    size: int  # of a group: neighbours in a row
    has_minimum: bool
    is_float: bool = False

    @property
    def form(self) -> Form:
        return Form(self.bits, self.has_minimum, self.is_float)


class GroupedWeights(NamedTuple):
    """A matrix: q int8 [outputs, inputs]; scale and minimum float16 [outputs, groups].

    In MXFP4 scales are uint8, and there are no minima.
    """

    scheme: Scheme
    q: Tensor
    scale: Tensor
    minimum: Tensor


INT4 = Scheme(4, 32, True)
"""The scheme of groups that plain weights are rounded to."""
MXFP4 = Scheme(4, 32, has_minimum=False, is_float=True)

_PANELS_AT_ONCE = 32  # while packing
_ROWS_AT_ONCE = 256  # of float32, while quantizing
_SMALLEST = 2**-24  # above 0 of float16
_INT16_MAX = np.float32(32767)
_GROUPS = 8  # that stay in the first cache while all rows pass
_FEW_TO_LAY_OUT = 4  # rows; so few that each panel is widened on the way
_FEW_ROWS = 16  # up to which groups are not worth laying out for AMX


def group_bytes(scheme: Scheme) -> int:
    """Bytes of one group of a panel."""
    return scheme.form.head_bytes + PANEL * scheme.size * scheme.bits // 8


def packed_bytes(scheme: Scheme, outputs: int, inputs: int) -> int:
    return -(-outputs // PANEL) * -(-inputs // scheme.size) * group_bytes(scheme)


def pack_groups(groups: GroupedWeights) -> Tensor:
    """Packs into bytes [panels, groups, bytes of a group]; missing outputs and inputs are 0."""
    scheme, (outputs, inputs) = groups.scheme, groups.q.shape
    num_panels, num_groups = -(-outputs // PANEL), -(-inputs // scheme.size)
    packed = torch.empty(num_panels, num_groups, group_bytes(scheme), dtype=torch.int8)
    for first in range(0, num_panels, _PANELS_AT_ONCE):
        target = packed[first : first + _PANELS_AT_ONCE]
        rows = slice(first * PANEL, (first + len(target)) * PANEL)
        missing = max(rows.stop - outputs, 0)
        q = F.pad(groups.q[rows], (0, num_groups * scheme.size - inputs, 0, missing))
        q = q.view(len(target), PANEL, num_groups, scheme.size // 2, 2).permute(0, 2, 3, 1, 4)
        q = q.reshape(len(target), num_groups, scheme.size // 2, 2 * PANEL)
        if scheme.bits == 4:
            q = q[..., :PANEL] | q[..., PANEL:] << 4
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
    """Rounds to the nearest step between each group's smallest and largest value and 0."""
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
    """Rows as int16; for each of their groups its scale, and the scaled sum of what it holds."""
    num_groups = scales.shape[1] // 2
    size = 32 if x.shape[1] > 16 * num_groups else 16  # one group of 32 may be half empty
    for m in range(x.shape[0]):
        for group in range(num_groups):
            span = slice(group * size, (group + 1) * size)
            largest = largest_size(x[m, span])
            scale = largest / _INT16_MAX
            to_int16(x[m, span], _INT16_MAX / largest if largest > 0 else scale, wide[m, span])
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
    return product_by(Way(name, _quantize_bytes, multiply, np.int16, _scale_and_sum))


def _way_of(form: Form) -> Way:
    made = _multiply if HAS_512 else _multiply_laid_out
    return Way(form.name, _quantize, made(form.name, form), np.int16, _scale_and_sum)


def _tiles(form: Form) -> Any:
    def tile_of(num_rows: int, num_vectors: int) -> Any:
        return group_tile(num_rows, num_vectors, form)

    return tile_of


def _multiply(name: str, form: Form) -> Any:
    take = over_panel(name, _tiles(form))
    head, line_bytes = form.head_bytes, form.line_bytes

    @compiled_as(name)
    def multiply(w: Any, x: Any, scales: Any, num_rows: int, out: Any, after: Any) -> None:
        """out += x times w [groups, bytes]; as product.multiply."""
        num_groups, num_lines = w.shape[0], (w.shape[1] - head) // line_bytes
        all_tiles = num_groups * num_tiles(num_rows)
        share = (after.size + all_tiles - 1) // all_tiles
        span, base = (0, num_groups, num_lines, share), np.int64(after.ctypes.data)
        take(w, (x, scales, out), num_rows, span, (base, num_groups * share))

    return multiply


def _multiply_laid_out(name: str, form: Form) -> Any:
    has_minimum = form.has_minimum
    packed, wide = _tiles(form), _tiles(Form(WIDE, has_minimum))
    take_pair, take_few = over_pair(name, packed), over_halves(name, packed, _FEW_TO_LAY_OUT)
    take_many, lay_out = over_halves(f"{name}_wide", wide, MANY), group_layout(form)
    head, line_bytes = form.head_bytes, form.line_bytes

    @compiled_as(name)
    def multiply(w: Any, x: Any, scales: Any, num_rows: int, out: Any, after: Any) -> None:
        """The same; more than a few rows all meet some groups, laid out once, before the next."""
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


BY_4, BY_8, BY_8_AND_MINIMUM = map(_way_of, (Form(4, True), Form(8, False), Form(8, True)))
BY_MXFP4 = _way_of(MXFP4.form)
_by_4, _by_8, _by_8_and_minimum = map(product_by, (BY_4, BY_8, BY_8_AND_MINIMUM))
_by_mxfp4 = product_by(BY_MXFP4)
_by_4_amx, _by_8_amx = _product_amx(4, True), _product_amx(8, False)
_by_8_and_minimum_amx = _product_amx(8, True)


@njit
def _panels(g: Any) -> Any:
    shape = ((g.outputs + PANEL - 1) // PANEL, g.groups, g.group_bytes)
    return carray(i8_at(g.weight), shape)


@njit
def _of_bf16(g: Any) -> Any:
    return carray(u16_at(g.x), (g.rows, g.inputs)), carray(u16_at(g.y), (g.rows, g.outputs))


@Kernel
def _bf16_by_4(a: Any) -> None:
    g = read_product(a)
    x, y = _of_bf16(g)
    _by_4(a, _panels(g), x, (y, *scale_and_bias(g)))


@Kernel
def _bf16_by_8(a: Any) -> None:
    g = read_product(a)
    x, y = _of_bf16(g)
    _by_8(a, _panels(g), x, (y, *scale_and_bias(g)))


@Kernel
def _bf16_by_8_and_minimum(a: Any) -> None:
    g = read_product(a)
    x, y = _of_bf16(g)
    _by_8_and_minimum(a, _panels(g), x, (y, *scale_and_bias(g)))


@Kernel
def _bf16_by_mxfp4(a: Any) -> None:
    g = read_product(a)
    x, y = _of_bf16(g)
    _by_mxfp4(a, _panels(g), x, (y, *scale_and_bias(g)))


@Kernel
def _float_by_4(a: Any) -> None:
    g = read_product(a)
    x, y = carray(f32_at(g.x), (g.rows, g.inputs)), carray(f32_at(g.y), (g.rows, g.outputs))
    _by_4(a, _panels(g), x, (y, *scale_and_bias(g)))


@Kernel
def _bf16_by_4_or_amx(a: Any) -> None:
    g = read_product(a)
    x, y = _of_bf16(g)
    target = (y, *scale_and_bias(g))
    if g.rows > _FEW_ROWS:
        _by_4_amx(a, _panels(g), x, target)
    else:
        _by_4(a, _panels(g), x, target)


@Kernel
def _bf16_by_8_or_amx(a: Any) -> None:
    g = read_product(a)
    x, y = _of_bf16(g)
    target = (y, *scale_and_bias(g))
    if g.rows > _FEW_ROWS:
        _by_8_amx(a, _panels(g), x, target)
    else:
        _by_8(a, _panels(g), x, target)


@Kernel
def _bf16_by_8_and_minimum_or_amx(a: Any) -> None:
    g = read_product(a)
    x, y = _of_bf16(g)
    target = (y, *scale_and_bias(g))
    if g.rows > _FEW_ROWS:
        _by_8_and_minimum_amx(a, _panels(g), x, target)
    else:
        _by_8_and_minimum(a, _panels(g), x, target)


BF16_BY_4, FLOAT_BY_4, BF16_BY_8 = _bf16_by_4, _float_by_4, _bf16_by_8
BF16_BY_8_AND_MINIMUM, BF16_BY_MXFP4 = _bf16_by_8_and_minimum, _bf16_by_mxfp4
# rows of float32 meet none but weights that `--quantize int4` has rounded
_KERNELS = {
    Form(4, True): {torch.bfloat16: _bf16_by_4, torch.float32: _float_by_4},
    Form(8, False): {torch.bfloat16: _bf16_by_8},
    Form(8, True): {torch.bfloat16: _bf16_by_8_and_minimum},
    MXFP4.form: {torch.bfloat16: _bf16_by_mxfp4},
}


# none for MXFP4: its rows meet vectors
_KERNELS_AMX = {
    Form(4, True): _bf16_by_4_or_amx,
    Form(8, False): _bf16_by_8_or_amx,
    Form(8, True): _bf16_by_8_and_minimum_or_amx,
}


def kernels_of(
    scheme: Scheme, num_inputs: int, instructions: InstructionSet | None = None
) -> dict[torch.dtype, Kernel]:
    """Kernels by the type of the rows; default `instructions`: the processor's best."""
    kernels, by_amx = _KERNELS[scheme.form], _KERNELS_AMX.get(scheme.form)
    is_amx = (instructions or instruction_sets_here()[0]) == "amx"
    if by_amx and is_amx and num_inputs % scheme.size == 0:
        return kernels | {torch.bfloat16: by_amx}
    return kernels
