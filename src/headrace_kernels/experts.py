"""Owns the product of rows with their experts' matrices: all of a layer's experts in one kernel.

Rows lie expert by expert (routing.py). A piece of work is one panel of one expert for a block of
its rows, so each panel streams from memory once, and the next is asked for meanwhile, whosever it
is. Panels meet rows as in product.py and groups.py: a row's result is the same, to the bit.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit
from numba.np.numpy_support import carray
from torch import Tensor

from headrace_kernels import groups, product
from headrace_kernels.arguments import arguments_of, reader
from headrace_kernels.launch import Kernel, parallel
from headrace_kernels.numeric import (
    compiled_as,
    f32_at,
    i8_at,
    i32_at,
    i64_at,
    take_next,
    u16_at,
)
from headrace_kernels.product import BLOCK_BYTES, Operand, Way
from headrace_kernels.registers import MANY, reached
from headrace_kernels.routing import Routing
from headrace_kernels.tiles import CACHE_LINE, PANEL, empty_rows


class _Experts(NamedTuple):
    tokens: int
    chosen: int  # experts by each token
    experts: int
    outputs: int
    inputs: int
    is_gathered: int  # x has a row for each token, else one for each of its experts
    table: int  # addresses: of each expert's weight, scale and bias
    firsts: int  # rows of y that belong to each expert
    sources: int  # the token of each row of y
    x: int
    y: int
    groups: int  # these two are of weights in groups alone
    group_bytes: int


_read = reader(_Experts)


@njit
def _find(firsts: Any, size: int, num_panels: int, piece: int, found: Any) -> Any:
    """The expert of a piece, its first piece and its end; `found`: those of an earlier piece."""
    expert, begin, end = found
    while piece >= end and expert + 2 < firsts.size:
        expert += 1
        count = np.int64(firsts[expert + 1] - firsts[expert])
        begin, end = end, end + (count + size - 1) // size * num_panels
    return expert, begin, end


@njit
def _largest(firsts: Any) -> Any:
    most = np.int64(0)
    for expert in range(firsts.size - 1):
        most = max(most, np.int64(firsts[expert + 1] - firsts[expert]))
    return most


def _products_by(way: Way, panels_of: Any) -> Any:
    """`panels_of` an address gives a matrix [panels, lines, numbers]."""
    name, take_in, multiply, dtype, num_scales = way
    num_bytes = np.dtype(dtype).itemsize
    apart = CACHE_LINE // num_bytes
    put = product.put

    @compiled_as(name)
    def products(counter: Any, g: Any, x: Any, y: Any) -> None:
        """Pieces, a panel of an expert for a block of its rows each, until none is left."""
        table = carray(i64_at(g.table), (g.experts, 3))
        firsts = carray(i32_at(g.firsts), g.experts + 1)
        sources = carray(i32_at(g.sources), g.tokens * g.chosen)
        num_panels, inputs = _num_panels(g), g.inputs
        size = max(BLOCK_BYTES // (num_bytes * inputs) // MANY, 1) * MANY
        size = max(min(_largest(firsts), size), 1)
        padded = reached(size)
        wide = empty_rows(padded, inputs + apart, dtype)
        wide[size:], wide[:, inputs:] = 0, 0
        scales = np.ones((padded, num_scales(panels_of(g, table[0, 0])[0], inputs)), np.float32)
        out = empty_rows(padded, PANEL, np.float32)
        held = np.int64(-1)  # the row of y that begins the block in `wide`
        piece: int = take_next(counter)
        found = _find(firsts, size, num_panels, piece, (-1, 0, 0))
        while piece < found[2]:
            following: int = take_next(counter)
            next_found = _find(firsts, size, num_panels, following, found)
            expert, at = found[0], piece - found[1]
            first = np.int64(firsts[expert]) + at // num_panels * size
            count = min(np.int64(firsts[expert + 1]) - first, size)
            if held != first:
                held = first
                for m in range(count):
                    row = np.int64(sources[first + m]) if g.is_gathered else first + m
                    one = slice(m, m + 1)
                    take_in(x[row : row + 1], wide[one], scales[one])
            w = panels_of(g, table[expert, 0])
            after = panels_of(g, table[next_found[0], 0])
            is_last = following >= next_found[2]
            ahead = num_panels if is_last else (following - next_found[1]) % num_panels
            out[: reached(count)] = 0
            multiply(w[at % num_panels], wide, scales, count, out, after[ahead:][:1])
            scale = carray(f32_at(table[expert, 1]), g.outputs)
            bias = carray(f32_at(table[expert, 2]), g.outputs)
            put(out, count, (y, scale, bias), first, at % num_panels * PANEL)
            piece, found = following, next_found

    return products


@njit
def _num_panels(g: Any) -> int:
    return (g.outputs + PANEL - 1) // PANEL


@njit
def _panels_bf16(g: Any, address: int) -> Any:
    return carray(u16_at(address), (_num_panels(g), (g.inputs + 1) // 2, 2 * PANEL))


@njit
def _panels_int8(g: Any, address: int) -> Any:
    return carray(i8_at(address), (_num_panels(g), (g.inputs + 1) // 2, 2 * PANEL))


@njit
def _panels_in_groups(g: Any, address: int) -> Any:
    return carray(i8_at(address), (_num_panels(g), g.groups, g.group_bytes))


@njit
def _of_bf16(g: Any) -> Any:
    rows = g.tokens * g.chosen
    num_x = g.tokens if g.is_gathered else rows
    return carray(u16_at(g.x), (num_x, g.inputs)), carray(u16_at(g.y), (rows, g.outputs))


@njit
def _of_float(g: Any) -> Any:
    rows = g.tokens * g.chosen
    num_x = g.tokens if g.is_gathered else rows
    return carray(f32_at(g.x), (num_x, g.inputs)), carray(f32_at(g.y), (rows, g.outputs))


_by_bf16 = _products_by(product.BF16, _panels_bf16)
_by_bf16_dot = _products_by(product.BF16_DOT, _panels_bf16)
_by_int8 = _products_by(product.INT8, _panels_int8)
_by_4 = _products_by(groups.BY_4, _panels_in_groups)
_by_8 = _products_by(groups.BY_8, _panels_in_groups)
_by_8_and_minimum = _products_by(groups.BY_8_AND_MINIMUM, _panels_in_groups)
_by_mxfp4 = _products_by(groups.BY_MXFP4, _panels_in_groups)


@Kernel
def _bf16_by_bf16(a: Any) -> None:
    g = _read(a)
    x, y = _of_bf16(g)
    _by_bf16(a, g, x, y)


@Kernel
def _bf16_dot(a: Any) -> None:
    g = _read(a)
    x, y = _of_bf16(g)
    _by_bf16_dot(a, g, x, y)


@Kernel
def _bf16_by_int8(a: Any) -> None:
    g = _read(a)
    x, y = _of_bf16(g)
    _by_int8(a, g, x, y)


@Kernel
def _float_by_int8(a: Any) -> None:
    g = _read(a)
    x, y = _of_float(g)
    _by_int8(a, g, x, y)


@Kernel
def _bf16_by_4(a: Any) -> None:
    g = _read(a)
    x, y = _of_bf16(g)
    _by_4(a, g, x, y)


@Kernel
def _float_by_4(a: Any) -> None:
    g = _read(a)
    x, y = _of_float(g)
    _by_4(a, g, x, y)


@Kernel
def _bf16_by_8(a: Any) -> None:
    g = _read(a)
    x, y = _of_bf16(g)
    _by_8(a, g, x, y)


@Kernel
def _bf16_by_8_and_minimum(a: Any) -> None:
    g = _read(a)
    x, y = _of_bf16(g)
    _by_8_and_minimum(a, g, x, y)


@Kernel
def _bf16_by_mxfp4(a: Any) -> None:
    g = _read(a)
    x, y = _of_bf16(g)
    _by_mxfp4(a, g, x, y)


_OF_MANY: Mapping[Kernel, Kernel] = {
    product.BF16_BY_BF16: _bf16_by_bf16,
    product.BF16_DOT_KERNEL: _bf16_dot,
    product.BF16_BY_INT8: _bf16_by_int8,
    product.FLOAT_BY_INT8: _float_by_int8,
    groups.BF16_BY_4: _bf16_by_4,
    groups.FLOAT_BY_4: _float_by_4,
    groups.BF16_BY_8: _bf16_by_8,
    groups.BF16_BY_8_AND_MINIMUM: _bf16_by_8_and_minimum,
    groups.BF16_BY_MXFP4: _bf16_by_mxfp4,
}
"""By the kernel of one matrix, that of many. AMX has none."""


def can_route(operand: Operand) -> bool:
    """Whether there is a kernel for experts of that form."""
    return all(kernel in _OF_MANY for kernel in operand.kernels.values())


class ExpertProduct:
    """The product of rows with the matrices of a layer's experts, which are all of one form."""

    def __init__(self, operands: Sequence[Operand]) -> None:
        first = operands[0]
        self._kernels = {kind: _OF_MANY[kernel] for kind, kernel in first.kernels.items()}
        self._operands = operands
        self._sizes = first.num_outputs, first.num_inputs
        addresses = [(each.weight, *each.further[:2]) for each in operands]
        self._table = torch.tensor(addresses, dtype=torch.int64)
        self._form = first.further[2:]

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        """y [tokens, chosen, outputs]: its rows, expert by expert, are those of `routing.sources`.

        x: [tokens, inputs], or [tokens, chosen, inputs] whose rows lie as y's.
        """
        tokens, chosen = routing.weights.shape
        y = torch.empty((tokens, chosen, self._sizes[0]), dtype=x.dtype)
        words = _Experts(
            *(tokens, chosen, len(self._operands), *self._sizes, x.ndim == 2),
            *(self._table.data_ptr(), routing.firsts.data_ptr(), routing.sources.data_ptr()),
            *(x.data_ptr(), y.data_ptr(), *self._form),
        )
        parallel(self._kernels[x.dtype], arguments_of(*words))
        return y
