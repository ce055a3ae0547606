"""Owns what a gated delta net computes between its matrix products: convolution, gates, rule, norm.

The rule goes token by token, so that no cut of a prompt changes a bit. A head's state is taken in
tiles of 32 columns, which do not need each other and stay in the first cache for a whole chunk.
"""

import math
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit
from numba.np.numpy_support import carray
from torch import Tensor

from headrace.models.delta_rule import EPS
from headrace.runner.inputs import Batch
from headrace.runner.kernels.arguments import arguments_of, reader
from headrace.runner.kernels.delta_tile import COLUMNS, ROWS, delta_tile
from headrace.runner.kernels.launch import Kernel, parallel
from headrace.runner.kernels.numeric import (
    FAST,
    f32_at,
    fast_exp,
    i32_at,
    narrow,
    take_next,
    u16_at,
    widen,
)

_SPAN = 128  # channels that one thread convolves at a time
_EPS = np.float32(EPS)


class _Convolve(NamedTuple):
    tokens: int
    chunks: int
    starts: int
    lengths: int
    first_rows: int
    slots: int
    num_slots: int
    width: int
    channels: int
    stride: int
    inputs: int
    x: int
    weight: int
    out: int


class _Delta(NamedTuple):
    tokens: int
    chunks: int
    starts: int
    lengths: int
    first_rows: int
    slots: int
    num_slots: int
    heads: int
    share: int  # value heads of a key head
    key_dim: int
    value_dim: int
    stride: int  # of q, k and v
    state: int
    q: int
    k: int
    v: int
    decay: int
    beta: int
    out: int


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


_read_convolve, _read_delta, _read_gates, _read_norm = map(
    reader, (_Convolve, _Delta, _Gates, _GateNorm)
)


class _Chunks(NamedTuple):
    num: int  # the rest are empty
    starts: Any
    lengths: Any
    first_rows: Any
    slots: Any


@njit
def _chunks_of(g: Any) -> Any:
    lengths, count = carray(i32_at(g.lengths), g.chunks), 0
    while count < g.chunks and lengths[count]:
        count += 1
    return _Chunks(
        count,
        carray(i32_at(g.starts), g.chunks),
        lengths,
        carray(i32_at(g.first_rows), g.chunks),
        carray(i32_at(g.slots), g.chunks),
    )


@njit(fastmath=FAST)
def _add_weighed(weight: Any, x: Any, total: Any) -> None:
    for c in range(total.size):
        total[c] += widen(weight[c]) * widen(x[c])


@njit(fastmath=FAST, error_model="numpy")
def _silu(x: Any, wide: Any) -> None:
    """In two loops, in each of which the compiler finds vectors."""
    for c in range(x.size):
        wide[c] = fast_exp(-abs(x[c]))
    for c in range(x.size):
        top = max(wide[c], np.float32(x[c] >= 0))
        x[c] = x[c] * top / (np.float32(1) + wide[c])


@njit
def _convolve_span(x: Any, before: Any, weight: Any, out: Any) -> None:
    """Some channels of a chunk: x and out [tokens, channels], before [width - 1, channels]."""
    num_before, wide = len(before), np.empty(x.shape[1], np.float32)
    for t in range(len(x)):
        total = out[t]
        total[:] = 0
        for j in range(num_before + 1):
            i = t + j - num_before
            if i < 0:
                _add_weighed(weight[j], before[t + j], total)
            else:
                _add_weighed(weight[j], x[i], total)
        _silu(total, wide)
    for j in range(num_before):  # a row is written after it was last read
        i = len(x) - num_before + j
        for c in range(x.shape[1]):
            before[j, c] = before[len(x) + j, c] if i < 0 else x[i, c]


@njit
def _convolve(g: Any, a: Any, x: Any, inputs: Any, weight: Any) -> None:
    chunks, num_spans = _chunks_of(g), (g.channels + _SPAN - 1) // _SPAN
    out = carray(f32_at(g.out), (g.tokens, g.channels))
    while True:
        piece = take_next(a)
        if piece >= chunks.num * num_spans:
            break
        n, begin = piece // num_spans, piece % num_spans * _SPAN
        end, first = min(begin + _SPAN, g.channels), chunks.first_rows[n]
        stop = first + chunks.lengths[n]
        before = inputs[chunks.slots[n], :, begin:end]
        if not chunks.starts[n]:
            before[:] = 0
        part = out[first:stop, begin:end]
        _convolve_span(x[first:stop, begin:end], before, weight[:, begin:end], part)


@Kernel
def _convolve_bf16(a: Any) -> None:
    g = _read_convolve(a)
    inputs = carray(u16_at(g.inputs), (g.num_slots, g.width - 1, g.channels))
    weight = carray(u16_at(g.weight), (g.width, g.channels))
    _convolve(g, a, carray(u16_at(g.x), (g.tokens, g.stride)), inputs, weight)


@Kernel
def _convolve_float(a: Any) -> None:
    g = _read_convolve(a)
    inputs = carray(f32_at(g.inputs), (g.num_slots, g.width - 1, g.channels))
    weight = carray(f32_at(g.weight), (g.width, g.channels))
    _convolve(g, a, carray(f32_at(g.x), (g.tokens, g.stride)), inputs, weight)


@njit(fastmath=FAST)
def _inverse_length(x: Any) -> Any:
    total = np.float32(0)
    for i in range(x.size):
        total += x[i] * x[i]
    return np.float32(1) / np.sqrt(total + _EPS)


@njit(fastmath=FAST)
def _delta_any(state: Any, q: Any, k: Any, v: Any, out: Any, factors: Any) -> None:
    """One token of a head, as delta_tile; state [key_dim, value_dim] of any size."""
    kept, k_scale, beta, q_scale = factors
    for j in range(v.size):
        found = np.float32(0)
        for i in range(k.size):
            found += state[i, j] * k[i]
        move = (v[j] - found * kept * k_scale) * beta * k_scale
        read = np.float32(0)
        for i in range(k.size):
            state[i, j] = state[i, j] * kept + k[i] * move
            read += state[i, j] * q[i]
        out[j] = read * q_scale


@njit
def _delta_head(q: Any, k: Any, v: Any, out: Any, state: Any, factors: Any) -> None:
    """A chunk of a head; state: float32 [key_dim * value_dim]; factors: float32 [tokens, 4]."""
    key_dim, value_dim = q.shape[1], v.shape[1]
    if value_dim % COLUMNS or key_dim % ROWS:
        for t in range(len(q)):
            by = factors[t, 0], factors[t, 1], factors[t, 2], factors[t, 3]
            _delta_any(state.reshape((key_dim, value_dim)), q[t], k[t], v[t], out[t], by)
        return
    tiles = state.reshape((value_dim // COLUMNS, key_dim, COLUMNS))
    for number in range(len(tiles)):
        tile, first = tiles[number], number * COLUMNS
        for t in range(len(q)):
            by = factors[t, 0], factors[t, 1], factors[t, 2], factors[t, 3]
            delta_tile(tile, (q, k, v), out, (t, first), by)


@Kernel
def _delta(a: Any) -> None:
    g = _read_delta(a)
    chunks, kd, vd = _chunks_of(g), g.key_dim, g.value_dim
    q, k = carray(f32_at(g.q), (g.tokens, g.stride)), carray(f32_at(g.k), (g.tokens, g.stride))
    v = carray(f32_at(g.v), (g.tokens, g.stride))
    decay = carray(f32_at(g.decay), (g.tokens, g.heads))
    beta = carray(f32_at(g.beta), (g.tokens, g.heads))
    out = carray(f32_at(g.out), (g.tokens, g.heads, vd))
    states = carray(f32_at(g.state), (g.num_slots, g.heads, kd * vd))
    root = np.float32(1) / np.sqrt(np.float32(kd))
    while True:
        piece = take_next(a)
        if piece >= chunks.num * g.heads:
            break
        n, h = piece // g.heads, piece % g.heads
        first, state = chunks.first_rows[n], states[chunks.slots[n], h]
        rows = slice(first, first + chunks.lengths[n])
        keys, values = slice(h // g.share * kd, (h // g.share + 1) * kd), slice(h * vd, h * vd + vd)
        if not chunks.starts[n]:
            state[:] = 0
        queries, own = q[rows, keys], k[rows, keys]
        factors = np.empty((len(own), 4), np.float32)
        for t in range(len(own)):
            factors[t, 0] = fast_exp(decay[first + t, h])
            factors[t, 1] = _inverse_length(own[t])
            factors[t, 2] = beta[first + t, h]
            factors[t, 3] = _inverse_length(queries[t]) * root
        _delta_head(queries, own, v[rows, values], out[rows, h], state, factors)


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
    _silu(wide, out[1])
    for i in range(x.size):
        out[0][i] = narrow(x[i] * scale * widen(weight[i]) * wide[i], out[0][0])


@njit
def _norm(g: Any, a: Any, gate: Any, weight: Any, out: Any) -> None:
    """Each head by itself; gate: [tokens, row stride], out: [tokens, heads * dim]."""
    dim, eps = g.dim, np.float32(np.float64(g.eps) * 1e-12)
    x = carray(f32_at(g.x), (g.tokens, g.heads * dim))
    wide, room = np.empty(dim, np.float32), np.empty(dim, np.float32)
    while True:
        token = take_next(a)
        if token >= g.tokens:
            break
        for h in range(g.heads):
            span = slice(h * dim, (h + 1) * dim)
            into = out[token, span], room
            _norm_head(x[token, span], gate[token, span], weight, eps, wide, into)


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


_CONVOLVE = {torch.bfloat16: _convolve_bf16, torch.float32: _convolve_float}
_GATES = {torch.bfloat16: _gates_bf16, torch.float32: _gates_float}
_NORM = {torch.bfloat16: _norm_bf16, torch.float32: _norm_float}


def _where(batch: Batch) -> tuple[int, ...]:
    """The chunks, as the first arguments after the number of tokens."""
    arrays = batch.starts, batch.lengths, batch.first_rows, batch.slots
    return len(batch.starts), *(array.ctypes.data for array in arrays)


def convolve(batch: Batch, inputs: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Step.convolve; inputs: [slots, width - 1, channels], the last ones, which are moved on."""
    out = torch.empty(x.shape, dtype=torch.float32)
    sizes = len(inputs), *weight.shape, x.stride(0)
    pointers = inputs.data_ptr(), x.data_ptr(), weight.data_ptr(), out.data_ptr()
    words = _Convolve._make((len(x), *_where(batch), *sizes, *pointers))
    parallel(_CONVOLVE[x.dtype], arguments_of(*words))
    return out


def delta_rule(
    batch: Batch, states: Tensor, qkv: tuple[Tensor, Tensor, Tensor], decay: Tensor, beta: Tensor
) -> Tensor:
    """Step.delta_rule; states: float32 [slots, heads, key_dim, value_dim], which are moved on.

    The numbers of a head's state lie in tiles [key_dim, 32] where its sizes allow. q, k and v are
    parts of the same rows; decay and beta are contiguous.
    """
    q, k, v = qkv
    out = torch.empty(v.shape, dtype=torch.float32)
    stride = max(x.stride(0) for x in qkv)  # of a single row it may be anything
    sizes = len(states), v.shape[1], v.shape[1] // k.shape[1], q.shape[2], v.shape[2], stride
    tensors = states, q, k, v, decay, beta, out
    words = _Delta._make(
        (len(q), *_where(batch), *sizes, *(tensor.data_ptr() for tensor in tensors))
    )
    parallel(_delta, arguments_of(*words))
    return out


def delta_gates(a: Tensor, b: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Of a and b, parts of the same rows, and the table of CpuDeltaGates: decay and beta."""
    decay, beta = (torch.empty(a.shape, dtype=torch.float32) for _ in range(2))
    pointers = [tensor.data_ptr() for tensor in (a, b, table, decay, beta)]
    parallel(_GATES[a.dtype], arguments_of(*a.shape, a.stride(0), *pointers))
    return decay, beta


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """GatedNorm of contiguous x [tokens, heads, dim]; a token's gates lie in a row."""
    out = torch.empty(x.shape, dtype=gate.dtype)
    pointers = [tensor.data_ptr() for tensor in (x, gate, weight, out)]
    words = _GateNorm._make((*x.shape, gate.stride(0), round(eps * 1e12), *pointers))
    parallel(_NORM[gate.dtype], arguments_of(*words))
    return out
