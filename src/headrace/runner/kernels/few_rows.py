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
    high,
    i8_at,
    low,
    narrow,
    take_next,
    u16_at,
    u32_at,
    widen,
)
from headrace.runner.kernels.pool import Kernel, frame_of, spread

_PIECE = 64  # outputs in one piece of work
Weights = Any
"""Two arrays [outputs, inputs / 2] whose elements k belong to inputs of the two halves of x.

bfloat16: both are the same words of two neighbours, which widen by a shift and by a mask, with no
shuffling; x is then halved into even and odd inputs. int8: the left and the right half.
"""


@njit(fastmath=FAST)
def _dot_8x1(w: Weights, n: int, x: Any, m: int, out: Any) -> None:
    """Eight outputs for one row: eight streams keep the memory busy."""
    u, v = w
    u0, u1, u2, u3, u4, u5, u6, u7 = _eight(u, n)
    v0, v1, v2, v3, v4, v5, v6, v7 = _eight(v, n)
    left, right = x[0, m], x[1, m]
    a = b = c = d = e = f = g = h = np.float32(0)
    for k in range(left.size):
        p, q = left[k], right[k]
        a += low(u0[k]) * p + high(v0[k]) * q
        b += low(u1[k]) * p + high(v1[k]) * q
        c += low(u2[k]) * p + high(v2[k]) * q
        d += low(u3[k]) * p + high(v3[k]) * q
        e += low(u4[k]) * p + high(v4[k]) * q
        f += low(u5[k]) * p + high(v5[k]) * q
        g += low(u6[k]) * p + high(v6[k]) * q
        h += low(u7[k]) * p + high(v7[k]) * q
    out[0, 0], out[1, 0], out[2, 0], out[3, 0] = a, b, c, d
    out[4, 0], out[5, 0], out[6, 0], out[7, 0] = e, f, g, h


@njit(inline="always")
def _eight(u: Any, n: int) -> Any:
    return u[n], u[n + 1], u[n + 2], u[n + 3], u[n + 4], u[n + 5], u[n + 6], u[n + 7]


@njit(fastmath=FAST)
def _dot_4x4(w: Weights, n: int, x: Any, m: int, out: Any) -> None:
    """Four outputs for four rows: a weight is widened once for all four."""
    u, v = w
    u0, u1, u2, u3 = u[n], u[n + 1], u[n + 2], u[n + 3]
    v0, v1, v2, v3 = v[n], v[n + 1], v[n + 2], v[n + 3]
    p0, p1, p2, p3 = x[0, m], x[0, m + 1], x[0, m + 2], x[0, m + 3]
    q0, q1, q2, q3 = x[1, m], x[1, m + 1], x[1, m + 2], x[1, m + 3]
    a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = np.float32(0)
    c0 = c1 = c2 = c3 = d0 = d1 = d2 = d3 = np.float32(0)
    for k in range(p0.size):
        p, q = low(u0[k]), high(v0[k])
        a0 += p * p0[k] + q * q0[k]
        a1 += p * p1[k] + q * q1[k]
        a2 += p * p2[k] + q * q2[k]
        a3 += p * p3[k] + q * q3[k]
        p, q = low(u1[k]), high(v1[k])
        b0 += p * p0[k] + q * q0[k]
        b1 += p * p1[k] + q * q1[k]
        b2 += p * p2[k] + q * q2[k]
        b3 += p * p3[k] + q * q3[k]
        p, q = low(u2[k]), high(v2[k])
        c0 += p * p0[k] + q * q0[k]
        c1 += p * p1[k] + q * q1[k]
        c2 += p * p2[k] + q * q2[k]
        c3 += p * p3[k] + q * q3[k]
        p, q = low(u3[k]), high(v3[k])
        d0 += p * p0[k] + q * q0[k]
        d1 += p * p1[k] + q * q1[k]
        d2 += p * p2[k] + q * q2[k]
        d3 += p * p3[k] + q * q3[k]
    out[0, 0], out[0, 1], out[0, 2], out[0, 3] = a0, a1, a2, a3
    out[1, 0], out[1, 1], out[1, 2], out[1, 3] = b0, b1, b2, b3
    out[2, 0], out[2, 1], out[2, 2], out[2, 3] = c0, c1, c2, c3
    out[3, 0], out[3, 1], out[3, 2], out[3, 3] = d0, d1, d2, d3


@njit(fastmath=FAST)
def _dot_1x1(w: Weights, n: int, x: Any, m: int, out: Any) -> None:
    u0, v0, left, right = w[0][n], w[1][n], x[0, m], x[1, m]
    a = np.float32(0)
    for k in range(left.size):
        a += low(u0[k]) * left[k] + high(v0[k]) * right[k]
    out[0, 0] = a


@njit
def _put(target: Any, m: int, n: int, out: Any, size: Any) -> None:
    y, scale, bias = target
    for i in range(size[0]):
        for j in range(size[1]):
            value = out[i, j] * scale[n + i] + bias[n + i]
            y[m + j, n + i] = narrow(value, y[0, 0])


@njit
def _outputs(w: Weights, span: Any, x: Any, target: Any, out: Any) -> None:
    """Outputs [span): rows by fours, the rest one by one, eight outputs at a time."""
    first, stop = span
    rows = x.shape[1]
    fours = rows - rows % 4 if (stop - first) % 4 == 0 else 0
    for n in range(first, stop, 4):
        for m in range(0, fours, 4):
            _dot_4x4(w, n, x, m, out)
            _put(target, m, n, out, (4, 4))
    eights = stop - (stop - first) % 8
    for n in range(first, eights, 8):
        for m in range(fours, rows):
            _dot_8x1(w, n, x, m, out)
            _put(target, m, n, out, (8, 1))
    for n in range(eights, stop):
        for m in range(fours, rows):
            _dot_1x1(w, n, x, m, out)
            _put(target, m, n, out, (1, 1))


@njit
def _halved(x: Any, step: int, offset: int) -> Any:
    """x [rows, inputs] as float32 [2, rows, inputs / 2]: every step-th, from 0 and from offset."""
    wide = np.empty((2, x.shape[0], x.shape[1] // 2), np.float32)
    for m in range(x.shape[0]):
        for k in range(x.shape[1] // 2):
            wide[0, m, k] = widen(x[m, k * step])
            wide[1, m, k] = widen(x[m, k * step + offset])
    return wide


@njit
def _product(counter: Any, w: Weights, x: Any, target: Any) -> None:
    num_outputs = w[0].shape[0]
    out = np.empty((8, 4), np.float32)
    while True:
        n = take_next(counter) * _PIECE
        if n >= num_outputs:
            break
        _outputs(w, (n, min(n + _PIECE, num_outputs)), x, target, out)


@njit
def _scale_and_bias(g: Any) -> Any:
    return carray(f32_at(g[7]), g[1]), carray(f32_at(g[8]), g[1])


@njit
def _by_int8(a: Any, g: Any, x: Any, y: Any) -> None:
    half = g[2] // 2
    w = carray(i8_at(g[4]), (g[1], g[2]))
    halves = (w[:, :half], w[:, half:])
    _product(a, halves, _halved(x, 1, half), (y, *_scale_and_bias(g)))


@Kernel
def _bf16_by_bf16(a: Any) -> None:
    g = carray(a, 9)
    words = carray(u32_at(g[4]), (g[1], g[2] // 2))
    x, y = carray(u16_at(g[5]), (g[3], g[2])), carray(u16_at(g[6]), (g[3], g[1]))
    _product(a, (words, words), _halved(x, 2, 1), (y, *_scale_and_bias(g)))


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
    """x [rows, inputs] times the transpose of `by`; the number of inputs is even.

    Sums are float32, rounded once to x's dtype.
    """
    x = x.contiguous()
    rows = x.shape[0]
    y = torch.empty((rows, by.num_outputs), dtype=x.dtype)
    sizes = by.num_outputs, by.num_inputs, rows
    frame = frame_of(*sizes, by.weight, x.data_ptr(), y.data_ptr(), *by.rest)
    spread(_BODIES[x.dtype, by.dtype], frame)
    return y
