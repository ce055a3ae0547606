"""Computes the convolution and the delta rule of a gated delta net.

The convolution and the rule depend on earlier tokens. The rule is applied token by token, so a
prompt has the same results however the prompt is cut into chunks. The state of a head is split
into tiles of some columns. The tiles are independent of each other. Each tile stays in the L1
cache for a whole chunk.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit
from numba.np.numpy_support import carray
from torch import Tensor

from headrace_kernels.arguments import arguments_of, reader
from headrace_kernels.delta_tile import COLUMNS, delta_tile
from headrace_kernels.launch import Kernel, for_each_type, parallel
from headrace_kernels.numeric import FAST, f32_at, fast_exp, i32_at, take_next, widen
from headrace_kernels.silu import convolve_row, whole
from headrace_kernels.step import PackedStep
from headrace_kernels.tiles import LANES

_SPAN = 256  # channels per piece of work
# Added to a squared length before the square root, to avoid a division by zero.
_EPS = np.float32(1e-6)


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
    out_stride: int  # a multiple of the vector size
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
    share: int  # number of value heads for each key head
    key_dim: int
    value_dim: int
    stride: int  # stride of the rows of q, k and v
    state: int
    q: int
    k: int
    v: int
    decay: int
    beta: int
    out: int


_read_convolve, _read_delta = reader(_Convolve), reader(_Delta)


class _Chunks(NamedTuple):
    num: int  # number of chunks before the first empty chunk
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


@njit
def _widen_row(x: Any, wide: Any) -> None:
    for c in range(x.size):
        wide[c] = widen(x[c])


@njit
def _clear(x: Any) -> None:
    for c in range(x.size):
        x[c] = 0


@njit
def _convolve_span(x: Any, before: Any, weight: Any, span: slice, out: Any) -> None:
    """Convolve some channels of a chunk.

    x, out: [tokens, channels]; before: [width - 1, channels]; weight: float32 [width, channels].
    The rows of weight and of out have room up to the next multiple of a vector. All arguments are
    contiguous arrays, and `span` selects the channels. If slices were passed, the compiler could
    not know that the slices are contiguous and would not vectorize the loops.
    """
    width, first = len(weight), span.start
    # A ring of the last inputs: the newest input overwrites the oldest input.
    inputs = np.zeros(weight.shape, np.float32)
    for j in range(width - 1):
        _widen_row(before[j, span], inputs[j])
    for t in range(len(x)):
        _widen_row(x[t, span], inputs[(t + width - 1) % width])
        convolve_row(weight, inputs, t % width, out, (t, first))
    # The order ensures that no row of `before` is overwritten before its last use.
    for j in range(width - 1):
        i = len(x) - (width - 1) + j
        for c in range(first, span.stop):
            before[j, c] = before[len(x) + j, c] if i < 0 else x[i, c]


def _convolve_kernel(at: Any) -> Any:
    def convolve(a: Any) -> None:
        g = _read_convolve(a)
        chunks, num_spans = _chunks_of(g), (g.channels + _SPAN - 1) // _SPAN
        inputs = carray(at(g.inputs), (g.num_slots, g.width - 1, g.channels))
        weight = carray(at(g.weight), (g.width, g.channels))
        x = carray(at(g.x), (g.tokens, g.stride))
        out = carray(f32_at(g.out), (g.tokens, g.out_stride))
        while True:
            piece = take_next(a)
            if piece >= chunks.num * num_spans:
                break
            n, begin = piece // num_spans, piece % num_spans * _SPAN
            span, first = slice(begin, min(begin + _SPAN, g.channels)), chunks.first_rows[n]
            own = np.zeros((g.width, whole(span.stop - begin)), np.float32)
            for j in range(g.width):
                _widen_row(weight[j, span], own[j])
            before, stop = inputs[chunks.slots[n]], first + chunks.lengths[n]
            if not chunks.starts[n]:
                for j in range(g.width - 1):
                    _clear(before[j, span])
            _convolve_span(x[first:stop], before, own, span, out[first:stop])

    return convolve


@njit(fastmath=FAST)
def _inverse_length(x: Any) -> Any:
    total = np.float32(0)
    for i in range(x.size):
        total += x[i] * x[i]
    return np.float32(1) / np.sqrt(total + _EPS)


@njit(fastmath=FAST)
def _delta_any(state: Any, q: Any, k: Any, v: Any, out: Any, factors: Any) -> None:
    """Apply the rule for one token of a head, as `delta_tile` does, but for any size of state.

    state: [key_dim, value_dim]
    """
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
def _delta_head(qkv: Any, out: Any, state: Any, at: Any, factors: Any) -> None:
    """Apply the rule for one chunk of a head.

    at: the first row, the head's first column in q and k, the head's first column in v and out,
    key_dim and value_dim.
    state: float32 [key_dim * value_dim]; factors: float32 [tokens of the chunk, 4].
    """
    (q, k, v), (first, key, value, kd, vd) = qkv, at
    keys = slice(key, key + kd)
    if vd % COLUMNS:
        for t in range(len(factors)):
            by, row = (factors[t, 0], factors[t, 1], factors[t, 2], factors[t, 3]), first + t
            own, target = v[row, value : value + vd], out[row, value : value + vd]
            _delta_any(state.reshape((kd, vd)), q[row, keys], k[row, keys], own, target, by)
        return
    tiles = state.reshape((vd // COLUMNS, kd, COLUMNS))
    parts = q[:, keys], k[:, keys], v
    for number in range(len(tiles)):
        column = value + number * COLUMNS
        delta_tile(tiles[number], parts, out, (first, len(factors), column), factors)


@Kernel
def _delta(a: Any) -> None:
    g = _read_delta(a)
    chunks, kd, vd = _chunks_of(g), g.key_dim, g.value_dim
    q, k = carray(f32_at(g.q), (g.tokens, g.stride)), carray(f32_at(g.k), (g.tokens, g.stride))
    v = carray(f32_at(g.v), (g.tokens, g.stride))
    decay = carray(f32_at(g.decay), (g.tokens, g.heads))
    beta = carray(f32_at(g.beta), (g.tokens, g.heads))
    out = carray(f32_at(g.out), (g.tokens, g.heads * vd))
    states = carray(f32_at(g.state), (g.num_slots, g.heads, kd * vd))
    root = np.float32(1) / np.sqrt(np.float32(kd))
    while True:
        piece = take_next(a)
        if piece >= chunks.num * g.heads:
            break
        n, h = piece // g.heads, piece % g.heads
        first, state = np.int64(chunks.first_rows[n]), states[chunks.slots[n], h]
        if not chunks.starts[n]:
            state[:] = 0
        key = h // g.share * kd
        factors = np.empty((chunks.lengths[n], 4), np.float32)
        for t in range(len(factors)):
            row = first + t
            factors[t, 0] = fast_exp(decay[row, h])
            factors[t, 1] = _inverse_length(k[row, key : key + kd])
            factors[t, 2] = beta[row, h]
            factors[t, 3] = _inverse_length(q[row, key : key + kd]) * root
        _delta_head((q, k, v), out, state, (first, key, h * vd, kd, vd), factors)


_CONVOLVE = for_each_type(_convolve_kernel)


def _where(batch: PackedStep) -> tuple[int, ...]:
    """Return the kernel arguments that describe the chunks."""
    arrays = batch.starts, batch.lengths, batch.first_rows, batch.slots
    return len(batch.starts), *(array.ctypes.data for array in arrays)


def convolve(batch: PackedStep, inputs: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Return silu of the weighted sum of each channel's last `width` inputs.

    The newest input is multiplied with the last weight. x: [tokens, channels]; weight: [width,
    channels]; returns float32 [tokens, channels].
    inputs: [slots, width - 1, channels], the last inputs of each sequence, which are updated.
    """
    channels = x.shape[1]
    out = torch.empty((len(x), channels + -channels % LANES), dtype=torch.float32)
    sizes = len(inputs), *weight.shape, x.stride(0), out.shape[1]
    pointers = inputs.data_ptr(), x.data_ptr(), weight.data_ptr(), out.data_ptr()
    words = _Convolve._make((len(x), *_where(batch), *sizes, *pointers))
    parallel(_CONVOLVE[x.dtype], arguments_of(*words))
    return out[:, :channels]


def delta_rule(
    batch: PackedStep,
    states: Tensor,
    qkv: tuple[Tensor, Tensor, Tensor],
    decay: Tensor,
    beta: Tensor,
) -> Tensor:
    """Update the states S with each token and compute the outputs, using the gated delta rule.

    The rule is from Yang et al., 2024:

    S_t = exp(decay_t) S_{t-1} + k_t u_t^T,   u_t = beta_t (v_t - exp(decay_t) S_{t-1}^T k_t)
    out_t = S_t^T q_t, where q and k are scaled to length 1, and q by key_dim ** -0.5

    q, k: [tokens, key_heads, key_dim]; v: [tokens, heads, value_dim]; all three are float32 parts
    of the same rows.
    decay, beta: [tokens, heads], contiguous.
    states: float32 [slots, heads, key_dim, value_dim]. If value_dim is a multiple of COLUMNS, a
    head's state is stored as tiles [key_dim, COLUMNS].
    Returns float32 [tokens, heads, value_dim].
    """
    q, k, v = qkv
    out = torch.empty(v.shape, dtype=torch.float32)
    # Torch may report any stride for a single row.
    stride = max(x.stride(0) for x in qkv)
    sizes = len(states), v.shape[1], v.shape[1] // k.shape[1], q.shape[2], v.shape[2], stride
    tensors = states, q, k, v, decay, beta, out
    words = _Delta._make(
        (len(q), *_where(batch), *sizes, *(tensor.data_ptr() for tensor in tensors))
    )
    parallel(_delta, arguments_of(*words))
    return out
