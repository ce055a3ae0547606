"""Multiplies rows with the matrices of their experts, all experts of a layer in one kernel.

Rows are sorted by expert (routing.py). A piece of work is one panel of one expert for one block
of the expert's rows. So each panel is read from memory once for a block. Meanwhile the panel of
the next piece is prefetched, even if the next panel belongs to another expert. Rows are
multiplied as in product.py and groups.py, and the results are bit for bit the same.
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
from headrace_kernels.launch import Kernel, kernel_named, parallel
from headrace_kernels.numeric import f32_at, i32_at, i64_at, take_next, u16_at
from headrace_kernels.product import BLOCK_BYTES, Operand, ProductMethod
from headrace_kernels.registers import MAX_TILE_ROWS, padded_rows
from headrace_kernels.routing import Routing
from headrace_kernels.tiles import CACHE_LINE, PANEL, empty_rows


class _Experts(NamedTuple):
    tokens: int
    chosen: int  # number of experts of each token
    experts: int
    outputs: int
    inputs: int
    # Whether x has one row for each token. Otherwise x has one row for each expert of a token.
    is_gathered: int
    table: int  # addresses of each expert's weight, scale and bias
    firsts: int  # index of each expert's first row in y
    sources: int  # the token of each row of y
    x: int
    y: int
    # Only weights in groups use the remaining two fields.
    groups: int
    group_bytes: int


_read = reader(_Experts)


@njit
def _find(firsts: Any, size: int, num_panels: int, piece: int, found: Any) -> Any:
    """Return the expert of a piece, the expert's first piece and the end of the expert's pieces.

    `found` is the result for an earlier piece, from which the search continues.
    """
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


def _kernel(name: str, at: Any, panels_of: Any, method: ProductMethod) -> Kernel:
    """Make a kernel for many matrices, as `product.product_kernel` does for one matrix."""
    _, take_in, multiply, dtype, num_scales = method
    num_bytes = np.dtype(dtype).itemsize
    apart = CACHE_LINE // num_bytes
    put, num_panels_of = product.put, product.num_panels

    def products(counter: Any) -> None:
        """Take pieces until none is left: a panel of an expert for a block of the expert's rows."""
        g = _read(counter)
        num_rows = g.tokens * g.chosen
        x = carray(at(g.x), (g.tokens if g.is_gathered else num_rows, g.inputs))
        y = carray(at(g.y), (num_rows, g.outputs))
        table = carray(i64_at(g.table), (g.experts, 3))
        firsts = carray(i32_at(g.firsts), g.experts + 1)
        sources = carray(i32_at(g.sources), num_rows)
        num_panels, inputs = num_panels_of(g), g.inputs
        size = max(BLOCK_BYTES // (num_bytes * inputs) // MAX_TILE_ROWS, 1) * MAX_TILE_ROWS
        size = max(min(_largest(firsts), size), 1)
        padded = padded_rows(size)
        wide = empty_rows(padded, inputs + apart, dtype)
        wide[size:], wide[:, inputs:] = 0, 0
        scales = np.ones((padded, num_scales(panels_of(g, table[0, 0])[0], inputs)), np.float32)
        out = empty_rows(padded, PANEL, np.float32)
        # The row of y at which the block in `wide` starts; -1 before the first block.
        held = np.int64(-1)
        piece: int = take_next(counter)
        found = _find(firsts, size, num_panels, piece, (-1, 0, 0))
        while piece < found[2]:
            following: int = take_next(counter)
            next_found = _find(firsts, size, num_panels, following, found)
            expert, own = found[0], piece - found[1]
            first = np.int64(firsts[expert]) + own // num_panels * size
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
            out[: padded_rows(count)] = 0
            multiply(w[own % num_panels], wide, scales, count, out, after[ahead:][:1])
            scale = carray(f32_at(table[expert, 1]), g.outputs)
            bias = carray(f32_at(table[expert, 2]), g.outputs)
            put(out, count, (y, scale, bias), first, own % num_panels * PANEL)
            piece, found = following, next_found

    return kernel_named(name, products)


def _in_groups(name: str, method: ProductMethod, at: Any = u16_at) -> Kernel:
    return _kernel(name, at, groups.panels_in_groups, method)


_EXPERT_KERNELS: Mapping[Kernel, Kernel] = {
    product.BF16_BY_BF16: _kernel("bf16_by_bf16", u16_at, product.panels_bf16, product.BF16),
    product.BF16_BY_BF16_DOT: _kernel("bf16_dot", u16_at, product.panels_bf16, product.BF16_DOT),
    product.BF16_BY_INT8: _kernel("bf16_by_int8", u16_at, product.panels_int8, product.INT8),
    product.FLOAT_BY_INT8: _kernel("float_by_int8", f32_at, product.panels_int8, product.INT8),
    groups.BF16_BY_4: _in_groups("bf16_by_4", groups.BY_4),
    groups.FLOAT_BY_4: _in_groups("float_by_4", groups.BY_4, f32_at),
    groups.BF16_BY_8: _in_groups("bf16_by_8", groups.BY_8),
    groups.BF16_BY_8_AND_MINIMUM: _in_groups("bf16_by_8_and_minimum", groups.BY_8_AND_MINIMUM),
    groups.BF16_BY_MXFP4: _in_groups("bf16_by_mxfp4", groups.BY_MXFP4),
}
"""Maps each kernel for one matrix to the kernel for many matrices.

No kernel for many matrices uses AMX.
"""


def can_route(operand: Operand) -> bool:
    """Return whether a kernel for many experts exists for the weight format of `operand`."""
    return all(kernel in _EXPERT_KERNELS for kernel in operand.kernels.values())


class ExpertProduct:
    """Multiplies rows with the matrices of a layer's experts, which all have the same format."""

    def __init__(self, operands: Sequence[Operand]) -> None:
        first = operands[0]
        self._kernels = {kind: _EXPERT_KERNELS[kernel] for kind, kernel in first.kernels.items()}
        self._operands = operands
        self._sizes = first.num_outputs, first.num_inputs
        addresses = [(each.weight, *each.further[:2]) for each in operands]
        self._table = torch.tensor(addresses, dtype=torch.int64)
        self._form = first.further[2:]

    def __call__(self, x: Tensor, routing: Routing) -> Tensor:
        """Return y [tokens, chosen, outputs] with its rows sorted by expert.

        routing.sources: the token of each row of y. x: [tokens, inputs], or [tokens, chosen,
        inputs] with its rows in the same order as the rows of y.
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
