"""Owns the kernels between the matrix products: norm, rotation and gate.

Each is one pass and one launch where torch takes five to ten; results are float32 inside and
rounded once.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit
from numba.np.numpy_support import carray
from torch import Tensor

from headrace_kernels.arguments import arguments_of, reader
from headrace_kernels.launch import Kernel, parallel, serial
from headrace_kernels.numeric import (
    FAST,
    f32_at,
    fast_exp,
    narrow,
    take_next,
    u16_at,
    widen,
)
from headrace_kernels.silu import LIMIT, clamped_row, gelu_row, row_for, silu_row

SILU, GELU, CLAMPED = range(3)
"""Curves of a gate. CLAMPED is gpt-oss's, which also clamps what it gates, and adds 1."""

_ALONE = 1 << 13  # values up to which waking another thread costs more than it saves


class _Norm(NamedTuple):
    tokens: int
    heads: int
    dim: int
    stride: int
    head_stride: int
    eps: int  # in 1e-12
    shift: int  # what the weights are kept less
    x: int
    weight: int
    out: int


class _Rotate(NamedTuple):
    tokens: int
    heads: int
    dim: int
    half: int  # of the numbers that are turned
    stride: int
    cos: int
    sin: int
    x: int
    out: int


class _Gate(NamedTuple):
    tokens: int
    heads: int  # or experts
    size: int
    curve: int  # of those below
    x: int
    out: int


class _GateBy(NamedTuple):
    tokens: int
    heads: int
    dim: int
    stride: int
    head_stride: int
    x: int
    gate: int
    out: int


class _Add(NamedTuple):
    rows: int
    size: int
    x: int
    y: int
    out: int


_read_norm, _read_rotate = reader(_Norm), reader(_Rotate)
_read_gate, _read_gate_by, _read_add = reader(_Gate), reader(_GateBy), reader(_Add)


@njit(fastmath=FAST)
def _norm_row(x: Any, weight: Any, shift: Any, eps: Any, out: Any) -> None:
    total = np.float32(0)
    for i in range(x.size):
        value = widen(x[i])
        total += value * value
    scale = np.float32(1) / np.sqrt(total / np.float32(x.size) + eps)
    for i in range(x.size):
        out[i] = narrow(widen(x[i]) * scale * (shift + widen(weight[i])), out[0])


@njit
def _norm(g: Any, a: Any, x: Any, weight: Any, out: Any) -> None:
    """x: [tokens, row stride], out: [tokens, heads * dim]; each head is normed by itself."""
    tokens, heads, dim, apart = g.tokens, g.heads, g.dim, g.head_stride
    eps, shift = np.float32(np.float64(g.eps) * 1e-12), np.float32(g.shift)
    while True:
        token = take_next(a)
        if token >= tokens:
            break
        for h in range(heads):
            begin, into = h * apart, h * dim
            row = x[token, begin : begin + dim]
            _norm_row(row, weight, shift, eps, out[token, into : into + dim])


@Kernel
def _norm_bf16(a: Any) -> None:
    g = _read_norm(a)
    x = carray(u16_at(g.x), (g.tokens, g.stride))
    out = carray(u16_at(g.out), (g.tokens, g.heads * g.dim))
    _norm(g, a, x, carray(u16_at(g.weight), g.dim), out)


@Kernel
def _norm_float(a: Any) -> None:
    g = _read_norm(a)
    x = carray(f32_at(g.x), (g.tokens, g.stride))
    out = carray(f32_at(g.out), (g.tokens, g.heads * g.dim))
    _norm(g, a, x, carray(f32_at(g.weight), g.dim), out)


@njit(fastmath=FAST)
def _rotate_head(x: Any, cos: Any, sin: Any, out: Any) -> None:
    half = cos.size
    for i in range(half):
        left, right = widen(x[i]), widen(x[half + i])
        out[i] = narrow(left * cos[i] - right * sin[i], out[0])
        out[half + i] = narrow(right * cos[i] + left * sin[i], out[0])
    for i in range(2 * half, x.size):
        out[i] = x[i]


@njit
def _rotate(g: Any, a: Any, x: Any, out: Any) -> None:
    tokens, heads, dim = g.tokens, g.heads, g.dim
    cos, sin = carray(f32_at(g.cos), (tokens, g.half)), carray(f32_at(g.sin), (tokens, g.half))
    while True:
        token = take_next(a)
        if token >= tokens:
            break
        for h in range(heads):
            span = slice(h * dim, (h + 1) * dim)
            _rotate_head(x[token, span], cos[token], sin[token], out[token, span])


@Kernel
def _rotate_bf16(a: Any) -> None:
    g = _read_rotate(a)
    x = carray(u16_at(g.x), (g.tokens, g.stride))
    out = carray(u16_at(g.out), (g.tokens, g.heads * g.dim))
    _rotate(g, a, x, out)


@Kernel
def _rotate_float(a: Any) -> None:
    g = _read_rotate(a)
    x = carray(f32_at(g.x), (g.tokens, g.stride))
    out = carray(f32_at(g.out), (g.tokens, g.heads * g.dim))
    _rotate(g, a, x, out)


@njit(fastmath=FAST)
def _gate_row(gate: Any, up: Any, curve: Any, wide: Any, out: Any) -> None:
    for i in range(gate.size):
        wide[i] = widen(gate[i])
    if curve == CLAMPED:
        clamped_row(wide)
        for i in range(gate.size):
            other = max(min(widen(up[i]), np.float32(LIMIT)), np.float32(-LIMIT))
            out[i] = narrow(wide[i] * (other + np.float32(1)), out[0])
        return
    if curve == GELU:
        gelu_row(wide)
    else:
        silu_row(wide)
    for i in range(gate.size):
        out[i] = narrow(wide[i] * widen(up[i]), out[0])


@njit
def _gate(g: Any, a: Any, x: Any, out: Any) -> None:
    rows, size = g.tokens * g.heads, g.size
    wide = row_for(size)
    while True:
        row = take_next(a)
        if row >= rows:
            break
        _gate_row(x[row, :size], x[row, size:], g.curve, wide, out[row])


@Kernel
def _gate_bf16(a: Any) -> None:
    g = _read_gate(a)
    x = carray(u16_at(g.x), (g.tokens * g.heads, 2 * g.size))
    _gate(g, a, x, carray(u16_at(g.out), (g.tokens * g.heads, g.size)))


@Kernel
def _gate_float(a: Any) -> None:
    g = _read_gate(a)
    x = carray(f32_at(g.x), (g.tokens * g.heads, 2 * g.size))
    _gate(g, a, x, carray(f32_at(g.out), (g.tokens * g.heads, g.size)))


@njit(fastmath=FAST, error_model="numpy")
def _gate_head(x: Any, gate: Any, wide: Any, out: Any) -> None:
    """x * sigmoid(gate); the exponential is taken of the negative side, where it cannot overflow.

    Three loops over float32 `wide`: the compiler finds vectors in each, in none that does it all,
    nor where a division is watched for zeros as in Python.
    """
    for i in range(x.size):
        wide[i] = fast_exp(-abs(widen(gate[i])))
    for i in range(x.size):
        e = wide[i]
        top = max(e, np.float32(widen(gate[i]) >= 0))
        wide[i] = widen(x[i]) * top / (np.float32(1) + e)
    for i in range(x.size):
        out[i] = narrow(wide[i], out[0])


@njit
def _gate_by(g: Any, a: Any, x: Any, gate: Any, out: Any) -> None:
    """x and out: [tokens, heads * dim], gate: [tokens, row stride]."""
    dim, wide = g.dim, np.empty(g.dim, np.float32)
    while True:
        token = take_next(a)
        if token >= g.tokens:
            break
        for h in range(g.heads):
            span, begin = slice(h * dim, (h + 1) * dim), h * g.head_stride
            _gate_head(x[token, span], gate[token, begin : begin + dim], wide, out[token, span])


@Kernel
def _gate_by_bf16(a: Any) -> None:
    g = _read_gate_by(a)
    shape = (g.tokens, g.heads * g.dim)
    gate = carray(u16_at(g.gate), (g.tokens, g.stride))
    _gate_by(g, a, carray(u16_at(g.x), shape), gate, carray(u16_at(g.out), shape))


@Kernel
def _gate_by_float(a: Any) -> None:
    g = _read_gate_by(a)
    shape = (g.tokens, g.heads * g.dim)
    gate = carray(f32_at(g.gate), (g.tokens, g.stride))
    _gate_by(g, a, carray(f32_at(g.x), shape), gate, carray(f32_at(g.out), shape))


@njit(fastmath=FAST)
def _add(g: Any, a: Any, x: Any, y: Any, out: Any) -> None:
    while True:
        row = take_next(a)
        if row >= g.rows:
            break
        left, right, into = x[row], y[row], out[row]
        for i in range(g.size):
            into[i] = narrow(widen(left[i]) + widen(right[i]), into[0])


@Kernel
def _add_bf16(a: Any) -> None:
    g = _read_add(a)
    shape = (g.rows, g.size)
    x, y = carray(u16_at(g.x), shape), carray(u16_at(g.y), shape)
    _add(g, a, x, y, carray(u16_at(g.out), shape))


@Kernel
def _add_float(a: Any) -> None:
    g = _read_add(a)
    shape = (g.rows, g.size)
    x, y = carray(f32_at(g.x), shape), carray(f32_at(g.y), shape)
    _add(g, a, x, y, carray(f32_at(g.out), shape))


NORM = {torch.bfloat16: _norm_bf16, torch.float32: _norm_float}
ROTATE = {torch.bfloat16: _rotate_bf16, torch.float32: _rotate_float}
GATE = {torch.bfloat16: _gate_bf16, torch.float32: _gate_float}
GATE_BY = {torch.bfloat16: _gate_by_bf16, torch.float32: _gate_by_float}
ADD = {torch.bfloat16: _add_bf16, torch.float32: _add_float}


def norm(x: Tensor, weight: Tensor, eps: float, shift: int = 0) -> Tensor:
    """x over the root of its mean square, times shift + weight, along the last dimension."""
    heads = x.view(-1, 1, x.shape[-1]) if x.ndim == 2 else x
    heads = heads if heads.stride(2) == 1 else heads.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    pointers = heads.data_ptr(), weight.data_ptr(), out.data_ptr()
    strides = heads.stride()[:2]
    words = _Norm._make((*heads.shape, *strides, round(eps * 1e12), shift, *pointers))
    _launch(NORM[x.dtype], out, words)
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns pairs (j, j + half) of x [tokens, heads, dim]; cos, sin: float32 [tokens, half]."""
    heads = _by_heads(x)
    out = torch.empty(x.shape, dtype=x.dtype)
    pointers = cos.data_ptr(), sin.data_ptr(), heads.data_ptr(), out.data_ptr()
    tokens, num_heads, dim = heads.shape
    words = _Rotate(tokens, num_heads, dim, cos.shape[1], heads.stride(0), *pointers)
    _launch(ROTATE[x.dtype], out, words)
    return out


def gated(x: Tensor, curve: int = SILU) -> Tensor:
    """The curve of the left half * the right half of x [tokens, ..., 2 * size], contiguous."""
    out = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype)
    heads = x.shape[1] if x.ndim == 3 else 1
    pointers = x.data_ptr(), out.data_ptr()
    words = _Gate(len(out), heads, out.shape[-1], curve, *pointers)
    _launch(GATE[x.dtype], out, words)
    return out


def gated_by(x: Tensor, gate: Tensor) -> Tensor:
    """x [tokens, heads, dim], contiguous, times the sigmoid of a gate whose numbers lie in rows."""
    out = torch.empty(x.shape, dtype=x.dtype)
    pointers = x.data_ptr(), gate.data_ptr(), out.data_ptr()
    _launch(GATE_BY[x.dtype], out, _GateBy._make((*x.shape, *gate.stride()[:2], *pointers)))
    return out


def add(x: Tensor, y: Tensor, out: Tensor) -> None:
    """out = x + y; all [tokens, ...], contiguous, bfloat16 or float32."""
    pointers = x.data_ptr(), y.data_ptr(), out.data_ptr()
    _launch(ADD[x.dtype], out, _Add(len(out), out.numel() // len(out), *pointers))


def _launch(body: Kernel, out: Tensor, words: NamedTuple) -> None:
    (serial if out.numel() <= _ALONE else parallel)(body, arguments_of(*words))


def _by_heads(x: Tensor) -> Tensor:
    """x as [tokens, heads, dim] whose heads lie in a row; copied only if they do not."""
    heads = x.view(-1, 1, x.shape[-1]) if x.ndim == 2 else x
    return heads if heads.stride()[1:] == (heads.shape[2], 1) else heads.contiguous()
