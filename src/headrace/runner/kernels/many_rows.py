"""Owns the product of many rows with a stored matrix: each number is widened once, near the cores.

The rows lie side by side in panels, so that a vector holds one input of 16 rows and meets one
weight, spread over it. Weights stay as they are stored.
"""

from typing import Any

import numpy as np
import torch
from numba import njit
from numba.np.numpy_support import carray
from torch import Tensor

from headrace.runner.kernels.few_rows import Operand
from headrace.runner.kernels.numeric import f32_at, i8_at, narrow, take_next, u16_at, widen
from headrace.runner.kernels.pool import Kernel, frame_of, spread
from headrace.runner.kernels.tiles import outer_tile, transpose_tile

_LANES = 16
_PANEL = 48  # rows
_PIECE = 64  # outputs in one piece of work, a multiple of the outputs of every tile
_DEPTH = 512  # inputs at a time: a panel's share and the widened weights lie in the second cache
_STRETCH = 256  # inputs of 16 rows that are packed at a time
_LINE = 64  # bytes of the cache
_tile_16x1, _tile_8x2, _tile_8x3 = outer_tile(16, 1), outer_tile(8, 2), outer_tile(8, 3)


@njit
def _widen_row(row: Any, wide: Any) -> None:
    """A function of its own, so that it vectorizes."""
    for k in range(row.size):
        wide[k] = widen(row[k])


@njit
def _pack(counter: Any, x: Any, panels: Any) -> None:
    """x [rows, inputs] to panels [rows / 48][inputs][48, in the last one what is left]."""
    rows, num_inputs = x.shape
    padded = panels.size // num_inputs
    wide = np.zeros((_LANES, _STRETCH), np.float32)
    turned = np.empty((_STRETCH, _LANES), np.float32)
    num_stretches = (num_inputs + _STRETCH - 1) // _STRETCH
    while True:
        piece: int = take_next(counter)
        if piece >= num_stretches * (padded // _LANES):
            break
        first, start = piece // num_stretches * _LANES, piece % num_stretches * _STRETCH
        stop, row = min(start + _STRETCH, num_inputs), first // _PANEL * _PANEL
        for m in range(_LANES):
            if first + m < rows:
                _widen_row(x[first + m, start:stop], wide[m])
            else:
                wide[m] = 0
        for k in range(0, stop - start, _LANES):
            transpose_tile(wide[:, k:], turned[k:])
        panel = _panel(panels, row, padded, num_inputs)
        panel[start:stop, first - row : first - row + _LANES] = turned[: stop - start]


@njit(inline="always")
def _panel(panels: Any, row: int, padded: int, height: int) -> Any:
    """The part, [height, width], that holds the rows from `row` on."""
    width = min(_PANEL, padded - row)
    return panels[row * height : (row + width) * height].reshape(height, width)


@njit
def _multiply(w: Any, x: Any, out: Any, ahead: Any) -> None:
    """out [_PIECE, width] += w [_PIECE, inputs] times x [inputs, width].

    Fetches, a line with each input, from the first of the addresses `ahead` to the second.
    """
    (at, end), width, fetched = ahead, x.shape[1], _LINE * x.shape[0]
    for n in range(0, _PIECE, 16):
        first = (at, _LINE if at < end else 0)
        second = (at + fetched, first[1])
        if width == 3 * _LANES:
            _tile_8x3(w, n, x, out[n : n + 8], first)
            _tile_8x3(w, n + 8, x, out[n + 8 : n + 16], second)
        elif width == 2 * _LANES:
            _tile_8x2(w, n, x, out[n : n + 8], first)
            _tile_8x2(w, n + 8, x, out[n + 8 : n + 16], second)
        else:
            _tile_16x1(w, n, x, out[n : n + 16], first)
        at += fetched if width == _LANES else 2 * fetched


@njit
def _put_row(out: Any, scale: Any, bias: Any, y: Any) -> None:
    for n in range(y.size):
        y[n] = narrow(out[n] * scale[n] + bias[n], y[0])


@njit
def _put(out: Any, y: Any, first: int, scale: Any, bias: Any) -> None:
    """y [rows, from `first` on] of out [_PIECE, rows or more]."""
    turned = np.empty((_LANES, _PIECE), np.float32)
    for row in range(0, y.shape[0], _LANES):
        for n in range(0, _PIECE, _LANES):
            transpose_tile(out[n:, row:], turned[:, n:])
        for m in range(row, min(row + _LANES, y.shape[0])):
            _put_row(turned[m - row], scale, bias, y[m, first : first + scale.size])


@njit
def _product(counter: Any, w: Any, panels: Any, target: Any) -> None:
    """Pieces of outputs until none is left."""
    num_outputs, num_inputs = w.shape
    y, scale, bias = target
    padded = panels.size // num_inputs
    # Lines of rows that lie a power of two apart would drive each other out of the first cache.
    wide = np.zeros((_PIECE, min(_DEPTH, num_inputs) + _LANES), np.float32)
    out = np.empty(padded * _PIECE, np.float32)
    first = take_next(counter) * _PIECE
    while first < num_outputs:
        following = take_next(counter) * _PIECE
        stop = min(first + _PIECE, num_outputs)
        out[:] = 0
        for start in range(0, num_inputs, _DEPTH):
            end = min(start + _DEPTH, num_inputs)
            for n in range(first, stop):
                _widen_row(w[n, start:end], wide[n - first])
            for row in range(0, padded, _PANEL):
                x = _panel(panels, row, padded, num_inputs)
                ahead = _bytes_of(x[start:end])  # nothing new, unless there is something to fetch
                if row + _PANEL < padded:
                    ahead = _bytes_of(_panel(panels, row + _PANEL, padded, num_inputs)[start:end])
                elif 2 * end > num_inputs:
                    ahead = _bytes_of(w[following : following + _PIECE])
                part = _panel(out, row, padded, _PIECE)
                _multiply(wide[:, : end - start], x[start:end], part, ahead)
        for row in range(0, padded, _PANEL):
            part = _panel(out, row, padded, _PIECE)
            _put(part, y[row : row + _PANEL], first, scale[first:stop], bias[first:stop])
        first = following


@njit(inline="always")
def _bytes_of(x: Any) -> Any:
    first = np.int64(x.ctypes.data)
    return first, first + x.size * x.itemsize


@njit
def _matrix_and_rest(g: Any) -> Any:
    return carray(f32_at(g[5]), g[9] * g[2]), carray(f32_at(g[7]), g[1]), carray(f32_at(g[8]), g[1])


@Kernel
def _bf16_by_bf16(a: Any) -> None:
    g = carray(a, 10)
    panels, scale, bias = _matrix_and_rest(g)
    y = carray(u16_at(g[6]), (g[3], g[1]))
    _product(a, carray(u16_at(g[4]), (g[1], g[2])), panels, (y, scale, bias))


@Kernel
def _bf16_by_int8(a: Any) -> None:
    g = carray(a, 10)
    panels, scale, bias = _matrix_and_rest(g)
    y = carray(u16_at(g[6]), (g[3], g[1]))
    _product(a, carray(i8_at(g[4]), (g[1], g[2])), panels, (y, scale, bias))


@Kernel
def _float_by_int8(a: Any) -> None:
    g = carray(a, 10)
    panels, scale, bias = _matrix_and_rest(g)
    y = carray(f32_at(g[6]), (g[3], g[1]))
    _product(a, carray(i8_at(g[4]), (g[1], g[2])), panels, (y, scale, bias))


@Kernel
def _pack_bf16(a: Any) -> None:
    g = carray(a, 6)
    _pack(a, carray(u16_at(g[4]), (g[1], g[2])), carray(f32_at(g[5]), g[3] * g[2]))


@Kernel
def _pack_float(a: Any) -> None:
    g = carray(a, 6)
    _pack(a, carray(f32_at(g[4]), (g[1], g[2])), carray(f32_at(g[5]), g[3] * g[2]))


_PACK = {torch.bfloat16: _pack_bf16, torch.float32: _pack_float}
_BODIES = {
    (torch.bfloat16, torch.bfloat16): _bf16_by_bf16,
    (torch.bfloat16, torch.int8): _bf16_by_int8,
    (torch.float32, torch.int8): _float_by_int8,
}


def product(x: Tensor, by: Operand) -> Tensor:
    """x [rows, inputs] times the transpose of `by`.

    Sums are float32, rounded once to x's dtype.
    """
    x = x.contiguous()
    rows = x.shape[0]
    padded = -(-rows // _LANES) * _LANES
    panels = torch.empty(padded * by.num_inputs)
    spread(_PACK[x.dtype], frame_of(rows, by.num_inputs, padded, x.data_ptr(), panels.data_ptr()))
    y = torch.empty((rows, by.num_outputs), dtype=x.dtype)
    sizes, pointers = (by.num_outputs, by.num_inputs, rows), (by.weight, panels.data_ptr())
    frame = frame_of(*sizes, *pointers, y.data_ptr(), *by.rest, padded)
    spread(_BODIES[x.dtype, by.dtype], frame)
    return y
