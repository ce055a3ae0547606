"""Owns the product of a few rows with a stored matrix: each weight is read once, at memory speed.

Weights stay as they are stored, [outputs, inputs] row by row, so that the same bytes serve long
prompts; which rows are few is the caller's to say.
"""

from typing import Any

import numpy as np
import torch
from numba import njit
from numba.np.numpy_support import carray
from torch import Tensor

from headrace.runner.kernels.numeric import (
    FAST,
    f32_at,
    i8_at,
    narrow,
    take_next,
    u16_at,
    widen,
)
from headrace.runner.kernels.pool import Kernel, frame_of, spread
from headrace.runner.kernels.tiles import STEP, dot_tile, in_order

_PIECE_BYTES = 1 << 17  # of weights in one piece of work: fetched while the one before it is used
_MAX_PIECE = 64  # outputs in one piece
_TILE = 8  # outputs, at most
_dot_8x1, _dot_4x2, _dot_4x4 = dot_tile(8, 1), dot_tile(4, 2), dot_tile(4, 4)


@njit
def _by_tiles(w: Any, span: Any, x: Any, ahead: int, out: Any) -> None:
    """out[rows, span]: rows four by four, each with all outputs of the span.

    The weights come from memory for the first four only, the rows stay in the innermost cache.
    """
    first, stop = span
    rows = x.shape[0]
    m = 0
    while m + 4 <= rows:
        for n in range(first, stop, 4):
            _dot_4x4(w, n, x[m : m + 4], ahead, out[m : m + 4, n - first : n - first + 4])
        m += 4
    if m + 2 <= rows:
        for n in range(first, stop, 4):
            _dot_4x2(w, n, x[m : m + 2], ahead, out[m : m + 2, n - first : n - first + 4])
        m += 2
    if m < rows:
        for n in range(first, stop, 8):
            _dot_8x1(w, n, x[m:], ahead, out[m:, n - first : n - first + 8])


@njit(fastmath=FAST)
def _one(w: Any, x: Any) -> Any:
    total = np.float32(0)
    for k in range(w.size):
        total += widen(w[k]) * widen(x[k])
    return total


@njit
def _put(out: Any, scale: Any, bias: Any, y: Any) -> None:
    """One row; a function of its own, so that it vectorizes."""
    for n in range(y.size):
        y[n] = narrow(out[n] * scale[n] + bias[n], y[0])


@njit
def _one_by_one(w: Any, span: Any, x: Any, target: Any) -> None:
    """Outputs [span) in whatever number: the way of odd shapes."""
    y, scale, bias = target
    for n in range(span[0], span[1]):
        for m in range(x.shape[0]):
            y[m, n] = narrow(_one(w[n], x[m]) * scale[n] + bias[n], y[0, 0])


@njit
def _product(counter: Any, w: Any, x: Any, is_bf16: bool, target: Any) -> None:
    """Pieces of outputs until none is left; each fetches the beginning of the next."""
    num_outputs, num_inputs = w.shape
    in_steps = num_inputs % STEP == 0
    wide = in_order(x if in_steps else x[:0], is_bf16)
    fitting = _PIECE_BYTES // (num_inputs * w.itemsize) // _TILE * _TILE
    piece = min(max(fitting, _TILE), _MAX_PIECE)
    out = np.empty((x.shape[0], piece), np.float32)
    y, scale, bias = target
    first = take_next(counter) * piece
    while first < num_outputs:
        following = take_next(counter) * piece
        stop = min(first + piece, num_outputs)
        whole = stop - (stop - first) % _TILE if in_steps else first
        ahead = (following - first) * num_inputs * w.itemsize if following < num_outputs else 0
        _by_tiles(w, (first, whole), wide, ahead, out)
        for m in range(wide.shape[0]):
            _put(out[m], scale[first:whole], bias[first:whole], y[m, first:whole])
        if whole < stop:
            _one_by_one(w, (whole, stop), x, target)
        first = following


@njit
def _scale_and_bias(g: Any) -> Any:
    return carray(f32_at(g[7]), g[1]), carray(f32_at(g[8]), g[1])


@njit
def _by_int8(a: Any, g: Any, x: Any, y: Any) -> None:
    _product(a, carray(i8_at(g[4]), (g[1], g[2])), x, False, (y, *_scale_and_bias(g)))


@Kernel
def _bf16_by_bf16(a: Any) -> None:
    g = carray(a, 9)
    w = carray(u16_at(g[4]), (g[1], g[2]))
    x, y = carray(u16_at(g[5]), (g[3], g[2])), carray(u16_at(g[6]), (g[3], g[1]))
    _product(a, w, x, True, (y, *_scale_and_bias(g)))


@Kernel
def _bf16_by_int8(a: Any) -> None:
    g = carray(a, 9)
    _by_int8(a, g, carray(u16_at(g[5]), (g[3], g[2])), carray(u16_at(g[6]), (g[3], g[1])))


@Kernel
def _float_by_int8(a: Any) -> None:
    g = carray(a, 9)
    _by_int8(a, g, carray(f32_at(g[5]), (g[3], g[2])), carray(f32_at(g[6]), (g[3], g[1])))


_BODIES = {
    (torch.bfloat16, torch.bfloat16): _bf16_by_bf16,
    (torch.bfloat16, torch.int8): _bf16_by_int8,
    (torch.float32, torch.int8): _float_by_int8,
}


class Operand:
    """A stored matrix [outputs, inputs] with a float32 scale and bias per output, as addresses.

    Looking them up anew at every call would cost more than a small product.
    """

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor) -> None:
        self.dtype, (self.num_outputs, self.num_inputs) = weight.dtype, weight.shape
        self.weight, self.rest = weight.data_ptr(), (scale.data_ptr(), bias.data_ptr())
        self._held = weight, scale, bias


def product(x: Tensor, by: Operand) -> Tensor:
    """x [rows, inputs] times the transpose of `by`.

    Sums are float32, rounded once to x's dtype.
    """
    x = x.contiguous()
    rows = x.shape[0]
    y = torch.empty((rows, by.num_outputs), dtype=x.dtype)
    sizes = by.num_outputs, by.num_inputs, rows
    frame = frame_of(*sizes, by.weight, x.data_ptr(), y.data_ptr(), *by.rest)
    spread(_BODIES[x.dtype, by.dtype], frame)
    return y
