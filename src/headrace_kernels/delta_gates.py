"""Computes the gates and the final norm of a gated delta net.

The gates and the norm do not depend on earlier tokens.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit
from numba.np.numpy_support import carray
from torch import Tensor

from headrace_kernels.arguments import arguments_of, reader
from headrace_kernels.launch import for_each_type, parallel
from headrace_kernels.numeric import FAST, f32_at, narrow, take_next, widen
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
    eps: int  # unit 1e-12
    x: int
    gate: int
    weight: int
    out: int


_read_gates, _read_norm = reader(_Gates), reader(_GateNorm)


def _gates_kernel(at: Any) -> Any:
    def gates(a: Any) -> None:
        """Compute decay = rate * softplus(a + shift) and beta = sigmoid(b)."""
        g = _read_gates(a)
        shape = (g.tokens, g.stride)
        left, right = carray(at(g.a), shape), carray(at(g.b), shape)
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
                y = np.float64(widen(right[token, h]))
                beta[token, h] = np.float32(1.0 / (1.0 + math.exp(-y)))

    return gates


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


def _norm_kernel(at: Any) -> Any:
    def gated_norm(a: Any) -> None:
        """Normalize each head separately.

        gate: [tokens, row stride]; out: [tokens, heads * dim].
        """
        g = _read_norm(a)
        dim, eps = g.dim, np.float32(np.float64(g.eps) * 1e-12)
        x = carray(f32_at(g.x), (g.tokens, g.heads * dim))
        gate, weight = carray(at(g.gate), (g.tokens, g.stride)), carray(at(g.weight), dim)
        out, wide = carray(at(g.out), (g.tokens, g.heads * dim)), row_for(dim)
        while True:
            token = take_next(a)
            if token >= g.tokens:
                break
            for h in range(g.heads):
                span = slice(h * dim, (h + 1) * dim)
                _norm_head(x[token, span], gate[token, span], weight, eps, wide, out[token, span])

    return gated_norm


GATES, GATED_NORM = for_each_type(_gates_kernel), for_each_type(_norm_kernel)


def delta_gates(a: Tensor, b: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Compute decay and beta [tokens, heads].

    a, b: [tokens, heads], parts of the same rows. table: rates and shifts, as in `CpuDeltaGates`.
    """
    decay, beta = (torch.empty(a.shape, dtype=torch.float32) for _ in range(2))
    pointers = [tensor.data_ptr() for tensor in (a, b, table, decay, beta)]
    parallel(GATES[a.dtype], arguments_of(*a.shape, a.stride(0), *pointers))
    return decay, beta


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Divide each head of x by the head's root mean square; multiply with `weight` and silu(gate).

    x: float32 [tokens, heads, dim], contiguous. The gates of a token are contiguous.
    """
    out = torch.empty(x.shape, dtype=gate.dtype)
    pointers = [tensor.data_ptr() for tensor in (x, gate, weight, out)]
    words = _GateNorm._make((*x.shape, gate.stride(0), round(eps * 1e12), *pointers))
    parallel(GATED_NORM[gate.dtype], arguments_of(*words))
    return out
