"""Owns what a gated delta net computes of each token by itself: gates, and the norm at its end."""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit
from numba.np.numpy_support import carray
from torch import Tensor

from headrace_kernels.arguments import arguments_of, reader
from headrace_kernels.launch import Kernel, parallel
from headrace_kernels.numeric import FAST, f32_at, narrow, take_next, u16_at, widen
from headrace_kernels.silu import row_for, silu_row


class _Gates(NamedTuple):
    tokens: int
    heads: int
    stride: int
    a: int
    b: int
    table: int
    decay: int
    beta: int


class _GateNorm(NamedTuple):
    tokens: int
    heads: int
    dim: int
    stride: int
    eps: int  # in 1e-12
    x: int
    gate: int
    weight: int
    out: int


_read_gates, _read_norm = reader(_Gates), reader(_GateNorm)


@njit
def _gates(g: Any, a: Any, left: Any, right: Any) -> None:
    """decay = rate softplus(left + shift), beta = sigmoid(right)."""
    table = carray(f32_at(g.table), (2, g.heads))
    decay = carray(f32_at(g.decay), (g.tokens, g.heads))
    beta = carray(f32_at(g.beta), (g.tokens, g.heads))
    while True:
        token = take_next(a)
        if token >= g.tokens:
            break
        for h in range(g.heads):
            x = np.float64(widen(left[token, h]) + table[1, h])
            rate = max(x, 0.0) + math.log1p(math.exp(-abs(x)))
            decay[token, h] = np.float32(table[0, h] * rate)
            beta[token, h] = np.float32(1.0 / (1.0 + math.exp(-np.float64(widen(right[token, h])))))


@Kernel
def _gates_bf16(a: Any) -> None:
    g = _read_gates(a)
    shape = (g.tokens, g.stride)
    _gates(g, a, carray(u16_at(g.a), shape), carray(u16_at(g.b), shape))


@Kernel
def _gates_float(a: Any) -> None:
    g = _read_gates(a)
    shape = (g.tokens, g.stride)
    _gates(g, a, carray(f32_at(g.a), shape), carray(f32_at(g.b), shape))


@njit(fastmath=FAST, error_model="numpy")
def _norm_head(x: Any, gate: Any, weight: Any, eps: Any, wide: Any, out: Any) -> None:
    total = np.float32(0)
    for i in range(x.size):
        total += x[i] * x[i]
    scale = np.float32(1) / np.sqrt(total / np.float32(x.size) + eps)
    for i in range(x.size):
        wide[i] = widen(gate[i])
    silu_row(wide)
    for i in range(x.size):
        out[i] = narrow(x[i] * scale * widen(weight[i]) * wide[i], out[0])


@njit
def _norm(g: Any, a: Any, gate: Any, weight: Any, out: Any) -> None:
    """Each head by itself; gate: [tokens, row stride], out: [tokens, heads * dim]."""
    dim, eps = g.dim, np.float32(np.float64(g.eps) * 1e-12)
    x = carray(f32_at(g.x), (g.tokens, g.heads * dim))
    wide = row_for(dim)
    while True:
        token = take_next(a)
        if token >= g.tokens:
            break
        for h in range(g.heads):
            span = slice(h * dim, (h + 1) * dim)
            _norm_head(x[token, span], gate[token, span], weight, eps, wide, out[token, span])


@Kernel
def _norm_bf16(a: Any) -> None:
    g = _read_norm(a)
    gate = carray(u16_at(g.gate), (g.tokens, g.stride))
    out = carray(u16_at(g.out), (g.tokens, g.heads * g.dim))
    _norm(g, a, gate, carray(u16_at(g.weight), g.dim), out)


@Kernel
def _norm_float(a: Any) -> None:
    g = _read_norm(a)
    gate = carray(f32_at(g.gate), (g.tokens, g.stride))
    out = carray(f32_at(g.out), (g.tokens, g.heads * g.dim))
    _norm(g, a, gate, carray(f32_at(g.weight), g.dim), out)


GATES = {torch.bfloat16: _gates_bf16, torch.float32: _gates_float}
GATED_NORM = {torch.bfloat16: _norm_bf16, torch.float32: _norm_float}


def delta_gates(a: Tensor, b: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Computes decay and beta from a and b, parts of the same rows, and CpuDeltaGates' table."""
    decay, beta = (torch.empty(a.shape, dtype=torch.float32) for _ in range(2))
    pointers = [tensor.data_ptr() for tensor in (a, b, table, decay, beta)]
    parallel(GATES[a.dtype], arguments_of(*a.shape, a.stride(0), *pointers))
    return decay, beta


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """GatedNorm of contiguous x [tokens, heads, dim]; a token's gates lie in a row."""
    out = torch.empty(x.shape, dtype=gate.dtype)
    pointers = [tensor.data_ptr() for tensor in (x, gate, weight, out)]
    words = _GateNorm._make((*x.shape, gate.stride(0), round(eps * 1e12), *pointers))
    parallel(GATED_NORM[gate.dtype], arguments_of(*words))
    return out
