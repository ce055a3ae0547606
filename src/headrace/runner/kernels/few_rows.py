"""Owns the product of a few rows with a stored matrix: each weight is read once, at memory speed.

Weights stay as they are stored, [outputs, inputs] row by row, so that the same bytes serve long
prompts; which rows are few is the caller's to say.
"""

from typing import Any

import numpy as np
import torch
from numba import cfunc, njit
from numba.np.numpy_support import carray
from torch import Tensor

from headrace.runner.kernels.numeric import (
    FAST,
    KERNEL,
    f32_at,
    i8_at,
    narrow,
    take_next,
    u16_at,
    widen,
)
from headrace.runner.kernels.pool import frame_of, spread

_PIECE = 64  # outputs in one piece of work


@njit(fastmath=FAST)
def _dot_4x1(w: Any, n: int, x: Any, m: int, out: Any) -> None:
    """Four outputs for one row: four streams keep the memory busy."""
    w0, w1, w2, w3, x0 = w[n], w[n + 1], w[n + 2], w[n + 3], x[m]
    a = b = c = d = np.float32(0)
    for k in range(x0.size):
        v = x0[k]
        a += widen(w0[k]) * v
        b += widen(w1[k]) * v
        c += widen(w2[k]) * v
        d += widen(w3[k]) * v
    out[0, 0], out[1, 0], out[2, 0], out[3, 0] = a, b, c, d


@njit(fastmath=FAST)
def _dot_2x4(w: Any, n: int, x: Any, m: int, out: Any) -> None:
    """Two outputs for four rows: a weight is widened once for all four."""
    w0, w1, x0, x1, x2, x3 = w[n], w[n + 1], x[m], x[m + 1], x[m + 2], x[m + 3]
    a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = np.float32(0)
    for k in range(x0.size):
        u, v = widen(w0[k]), widen(w1[k])
        a0 += u * x0[k]
        a1 += u * x1[k]
        a2 += u * x2[k]
        a3 += u * x3[k]
        b0 += v * x0[k]
        b1 += v * x1[k]
        b2 += v * x2[k]
        b3 += v * x3[k]
    out[0, 0], out[0, 1], out[0, 2], out[0, 3] = a0, a1, a2, a3
    out[1, 0], out[1, 1], out[1, 2], out[1, 3] = b0, b1, b2, b3


@njit(fastmath=FAST)
def _dot_1x1(w: Any, n: int, x: Any, m: int, out: Any) -> None:
    a, w0, x0 = np.float32(0), w[n], x[m]
    for k in range(x0.size):
        a += widen(w0[k]) * x0[k]
    out[0, 0] = a


@njit
def _put(target: Any, m: int, n: int, out: Any, size: Any) -> None:
    y, scale, bias = target
    for i in range(size[0]):
        for j in range(size[1]):
            value = out[i, j] * scale[n + i] + bias[n + i]
            y[m + j, n + i] = narrow(value, y[0, 0])


@njit
def _outputs(w: Any, span: Any, x: Any, target: Any, out: Any) -> None:
    """Outputs [span) of all rows: rows by fours, what is left one by one."""
    n, stop = span
    fours = x.shape[0] - x.shape[0] % 4
    while n < stop:
        step = min(2 if fours else 4, stop - n)
        done = 0
        if fours and step == 2:
            for m in range(0, fours, 4):
                _dot_2x4(w, n, x, m, out)
                _put(target, m, n, out, (2, 4))
            done = fours
        for m in range(done, x.shape[0]):
            if step == 4:
                _dot_4x1(w, n, x, m, out)
                _put(target, m, n, out, (4, 1))
            else:
                for i in range(n, n + step):
                    _dot_1x1(w, i, x, m, out)
                    _put(target, m, i, out, (1, 1))
        n += step


@njit
def _widened(x: Any) -> Any:
    wide = np.empty(x.shape, np.float32)
    for m in range(x.shape[0]):
        for k in range(x.shape[1]):
            wide[m, k] = widen(x[m, k])
    return wide


@njit
def _product(counter: Any, w: Any, x: Any, target: Any) -> None:
    num_outputs = w.shape[0]
    wide = _widened(x)
    out = np.empty((4, 4), np.float32)
    while True:
        n = take_next(counter) * _PIECE
        if n >= num_outputs:
            break
        _outputs(w, (n, min(n + _PIECE, num_outputs)), wide, target, out)


@njit
def _scale_and_bias(g: Any) -> Any:
    return carray(f32_at(g[7]), g[1]), carray(f32_at(g[8]), g[1])


@cfunc(KERNEL, cache=True)
def _bf16_by_bf16(a: Any) -> None:
    g = carray(a, 9)
    w = carray(u16_at(g[4]), (g[1], g[2]))
    y = carray(u16_at(g[6]), (g[3], g[1]))
    _product(a, w, carray(u16_at(g[5]), (g[3], g[2])), (y, *_scale_and_bias(g)))


@cfunc(KERNEL, cache=True)
def _bf16_by_int8(a: Any) -> None:
    g = carray(a, 9)
    w = carray(i8_at(g[4]), (g[1], g[2]))
    y = carray(u16_at(g[6]), (g[3], g[1]))
    _product(a, w, carray(u16_at(g[5]), (g[3], g[2])), (y, *_scale_and_bias(g)))


@cfunc(KERNEL, cache=True)
def _float_by_int8(a: Any) -> None:
    g = carray(a, 9)
    w = carray(i8_at(g[4]), (g[1], g[2]))
    y = carray(f32_at(g[6]), (g[3], g[1]))
    _product(a, w, carray(f32_at(g[5]), (g[3], g[2])), (y, *_scale_and_bias(g)))


_BODIES = {
    (torch.bfloat16, torch.bfloat16): _bf16_by_bf16,
    (torch.bfloat16, torch.int8): _bf16_by_int8,
    (torch.float32, torch.int8): _float_by_int8,
}


def product(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """x [rows, inputs] times the transpose of weight [outputs, inputs], each output scaled, biased.

    `scale` and `bias` are float32 [outputs]; sums are float32, rounded once to x's dtype.
    """
    x = x.contiguous()
    rows, (num_outputs, num_inputs) = len(x), weight.shape
    y = x.new_empty(rows, num_outputs)
    frame = frame_of(
        num_outputs,
        num_inputs,
        rows,
        weight.data_ptr(),
        x.data_ptr(),
        y.data_ptr(),
        scale.data_ptr(),
        bias.data_ptr(),
    )
    spread(_BODIES[x.dtype, weight.dtype], frame)
    return y
