"""Runs the kernels between the matrix products: norms, rotary embedding, gates and sums.

Each kernel is one pass and one launch, where torch needs five to ten launches. Kernels compute in
float32 and round once.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit
from numba.np.numpy_support import carray
from torch import Tensor

from headrace_kernels.arguments import arguments_of, reader
from headrace_kernels.launch import Kernel, for_each_type, parallel, serial
from headrace_kernels.numeric import FAST, f32_at, fast_exp, narrow, take_next, widen
from headrace_kernels.silu import LIMIT, clamped_row, gelu_row, row_for, silu_row

SILU, GELU, CLAMPED = range(3)
"""Activations of a gate.

CLAMPED is the activation of gpt-oss. It also clamps the values that the gate multiplies, and adds
1 to these values.
"""

# Up to this number of values, waking another thread takes more time than it saves.
_ALONE = 1 << 13


class _Norm(NamedTuple):
    tokens: int
    heads: int
    dim: int
    stride: int
    head_stride: int
    eps: int  # unit 1e-12
    # Added to the weights, which are stored minus this shift.
    shift: int
    x: int
    weight: int
    out: int


class _Rotate(NamedTuple):
    tokens: int
    heads: int
    dim: int
    half: int  # half the count of the rotated numbers
    stride: int
    cos: int
    sin: int
    x: int
    out: int


class _Gate(NamedTuple):
    tokens: int
    heads: int  # number of heads or experts of a token
    size: int
    curve: int  # SILU, GELU or CLAMPED
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


def _norm_kernel(at: Any) -> Any:
    def norm(a: Any) -> None:
        """Normalize each head separately. x: [tokens, row stride], out: [tokens, heads * dim]."""
        g = _read_norm(a)
        tokens, heads, dim, apart = g.tokens, g.heads, g.dim, g.head_stride
        x, out = carray(at(g.x), (tokens, g.stride)), carray(at(g.out), (tokens, heads * dim))
        weight = carray(at(g.weight), dim)
        eps, shift = np.float32(np.float64(g.eps) * 1e-12), np.float32(g.shift)
        while True:
            token = take_next(a)
            if token >= tokens:
                break
            for h in range(heads):
                begin, into = h * apart, h * dim
                row = x[token, begin : begin + dim]
                _norm_row(row, weight, shift, eps, out[token, into : into + dim])

    return norm


@njit(fastmath=FAST)
def _rotate_head(x: Any, cos: Any, sin: Any, out: Any) -> None:
    half = cos.size
    for i in range(half):
        left, right = widen(x[i]), widen(x[half + i])
        out[i] = narrow(left * cos[i] - right * sin[i], out[0])
        out[half + i] = narrow(right * cos[i] + left * sin[i], out[0])
    for i in range(2 * half, x.size):
        out[i] = x[i]


def _rotate_kernel(at: Any) -> Any:
    def rotate(a: Any) -> None:
        g = _read_rotate(a)
        tokens, heads, dim = g.tokens, g.heads, g.dim
        x, out = carray(at(g.x), (tokens, g.stride)), carray(at(g.out), (tokens, heads * dim))
        cos, sin = carray(f32_at(g.cos), (tokens, g.half)), carray(f32_at(g.sin), (tokens, g.half))
        while True:
            token = take_next(a)
            if token >= tokens:
                break
            for h in range(heads):
                span = slice(h * dim, (h + 1) * dim)
                _rotate_head(x[token, span], cos[token], sin[token], out[token, span])

    return rotate


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


def _gate_kernel(at: Any) -> Any:
    def gate(a: Any) -> None:
        g = _read_gate(a)
        rows, size = g.tokens * g.heads, g.size
        x, out = carray(at(g.x), (rows, 2 * size)), carray(at(g.out), (rows, size))
        wide = row_for(size)
        while True:
            row = take_next(a)
            if row >= rows:
                break
            _gate_row(x[row, :size], x[row, size:], g.curve, wide, out[row])

    return gate


@njit(fastmath=FAST, error_model="numpy")
def _gate_head(x: Any, gate: Any, wide: Any, out: Any) -> None:
    """Write x * sigmoid(gate) to `out`.

    The exponential is computed for -|gate|, which cannot overflow. The compiler vectorizes three
    separate loops over the float32 buffer `wide`, but not a single loop with all the work. The
    compiler also does not vectorize a division with Python's check for zero; error_model="numpy"
    turns the check off.
    """
    for i in range(x.size):
        wide[i] = fast_exp(-abs(widen(gate[i])))
    for i in range(x.size):
        e = wide[i]
        top = max(e, np.float32(widen(gate[i]) >= 0))
        wide[i] = widen(x[i]) * top / (np.float32(1) + e)
    for i in range(x.size):
        out[i] = narrow(wide[i], out[0])


def _gate_by_kernel(at: Any) -> Any:
    def gate_by(a: Any) -> None:
        """Multiply x with the sigmoid of its gate.

        x, out: [tokens, heads * dim]; gate: [tokens, row stride].
        """
        g = _read_gate_by(a)
        dim, shape = g.dim, (g.tokens, g.heads * g.dim)
        x, out = carray(at(g.x), shape), carray(at(g.out), shape)
        gate, wide = carray(at(g.gate), (g.tokens, g.stride)), np.empty(dim, np.float32)
        while True:
            token = take_next(a)
            if token >= g.tokens:
                break
            for h in range(g.heads):
                span, begin = slice(h * dim, (h + 1) * dim), h * g.head_stride
                _gate_head(x[token, span], gate[token, begin : begin + dim], wide, out[token, span])

    return gate_by


@njit(fastmath=FAST)
def _add_row(x: Any, y: Any, out: Any) -> None:
    for i in range(out.size):
        out[i] = narrow(widen(x[i]) + widen(y[i]), out[0])


def _add_kernel(at: Any) -> Any:
    def add(a: Any) -> None:
        g = _read_add(a)
        shape = (g.rows, g.size)
        x, y, out = carray(at(g.x), shape), carray(at(g.y), shape), carray(at(g.out), shape)
        while True:
            row = take_next(a)
            if row >= g.rows:
                break
            _add_row(x[row], y[row], out[row])

    return add


NORM, ROTATE = for_each_type(_norm_kernel), for_each_type(_rotate_kernel)
GATE, GATE_BY = for_each_type(_gate_kernel), for_each_type(_gate_by_kernel)
ADD = for_each_type(_add_kernel)


def norm(x: Tensor, weight: Tensor, eps: float, shift: int = 0) -> Tensor:
    """Return x divided by its root mean square and multiplied with shift + weight.

    The mean is taken over the last dimension.
    """
    heads = x.view(-1, 1, x.shape[-1]) if x.ndim == 2 else x
    heads = heads if heads.stride(2) == 1 else heads.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    pointers = heads.data_ptr(), weight.data_ptr(), out.data_ptr()
    strides = heads.stride()[:2]
    words = _Norm._make((*heads.shape, *strides, round(eps * 1e12), shift, *pointers))
    _launch(NORM[x.dtype], out, words)
    return out


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (j, j + half) of x [tokens, heads, dim].

    cos, sin: float32 [tokens, half].
    """
    heads = _by_heads(x)
    out = torch.empty(x.shape, dtype=x.dtype)
    pointers = cos.data_ptr(), sin.data_ptr(), heads.data_ptr(), out.data_ptr()
    tokens, num_heads, dim = heads.shape
    words = _Rotate(tokens, num_heads, dim, cos.shape[1], heads.stride(0), *pointers)
    _launch(ROTATE[x.dtype], out, words)
    return out


def gated(x: Tensor, curve: int = SILU) -> Tensor:
    """Return the activated left half times the right half of x [tokens, ..., 2 * size].

    The result is contiguous.
    """
    out = torch.empty((*x.shape[:-1], x.shape[-1] // 2), dtype=x.dtype)
    heads = x.shape[1] if x.ndim == 3 else 1
    pointers = x.data_ptr(), out.data_ptr()
    words = _Gate(len(out), heads, out.shape[-1], curve, *pointers)
    _launch(GATE[x.dtype], out, words)
    return out


def gated_by(x: Tensor, gate: Tensor) -> Tensor:
    """Return x [tokens, heads, dim] times the sigmoid of `gate`.

    x is contiguous. In `gate`, only the numbers of each head must be contiguous.
    """
    out = torch.empty(x.shape, dtype=x.dtype)
    pointers = x.data_ptr(), gate.data_ptr(), out.data_ptr()
    _launch(GATE_BY[x.dtype], out, _GateBy._make((*x.shape, *gate.stride()[:2], *pointers)))
    return out


def add(x: Tensor, y: Tensor, out: Tensor) -> None:
    """Write x + y to `out`. All three are [tokens, ...], contiguous, bfloat16 or float32."""
    pointers = x.data_ptr(), y.data_ptr(), out.data_ptr()
    _launch(ADD[x.dtype], out, _Add(len(out), out.numel() // len(out), *pointers))


def _launch(body: Kernel, out: Tensor, words: NamedTuple) -> None:
    (serial if out.numel() <= _ALONE else parallel)(body, arguments_of(*words))


def _by_heads(x: Tensor) -> Tensor:
    """Return x as [tokens, heads, dim]; copy only if the heads of a token are not contiguous."""
    heads = x.view(-1, 1, x.shape[-1]) if x.ndim == 2 else x
    return heads if heads.stride()[1:] == (heads.shape[2], 1) else heads.contiguous()
