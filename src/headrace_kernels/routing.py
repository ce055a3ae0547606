"""Chooses the experts of each token, sorts the rows of a step by expert, and sums the results.

Each token has one row for each of its experts. Rows are sorted by expert and then by token, so
the rows of an expert are contiguous.
"""

from typing import Any, NamedTuple

import numpy as np
import torch
from numba import njit
from numba.np.numpy_support import carray
from torch import Tensor

from headrace_kernels.arguments import arguments_of, reader
from headrace_kernels.launch import Kernel, for_each_type, parallel, serial
from headrace_kernels.numeric import FAST, f32_at, fast_exp, i32_at, narrow, take_next, widen

# Up to this number of tokens, choosing takes less time than waking another thread.
_FEW_TOKENS = 4


class Routing(NamedTuple):
    """The experts of a step's tokens.

    Rows are sorted by expert. A row's place is its index in the sorted order.
    """

    weights: Tensor  # float32 [tokens, chosen]
    ids: Tensor  # int32 [tokens, chosen]: the numbers of the experts
    places: Tensor  # int32 [tokens, chosen]
    sources: Tensor  # int32 [tokens, chosen]: for each sorted row, the index of its token
    firsts: Tensor  # int32 [experts + 1]: the first place of each expert


class _Choose(NamedTuple):
    tokens: int
    experts: int
    chosen: int
    sums_to_one: int
    scores: int
    weights: int
    ids: int


class _Sort(NamedTuple):
    tokens: int
    experts: int
    chosen: int
    ids: int
    places: int
    sources: int
    firsts: int


class _Combine(NamedTuple):
    tokens: int
    chosen: int
    size: int
    y: int
    weights: int
    places: int
    # The address of the shared expert's results; 0 if the layer has no shared expert.
    shared: int
    gate: int
    out: int


_read_choose, _read_sort, _read_combine = reader(_Choose), reader(_Sort), reader(_Combine)


@njit(error_model="numpy")
def _choose_row(scores: Any, sums_to_one: Any, left: Any, weights: Any, ids: Any) -> None:
    """Choose the experts with the best scores, and compute their softmax weights.

    If several experts have equal scores, the first expert is chosen. The weights are relative to
    all experts or, if `sums_to_one` is true, only to the chosen experts. If scores are NaN, the ids
    are still valid, and a sum of 0 raises no error.
    """
    for e in range(scores.size):
        left[e] = widen(scores[e])
    for j in range(ids.size):
        best = 0
        for e in range(1, left.size):
            if left[e] > left[best]:
                best = e
        ids[j], weights[j], left[best] = best, left[best], -np.inf
    top, total = weights[0], np.float32(0)
    for e in range(scores.size):
        total += fast_exp(widen(scores[e]) - top)
    for j in range(ids.size):
        weights[j] = fast_exp(weights[j] - top)
    if sums_to_one:
        total = np.float32(0)
        for j in range(ids.size):
            total += weights[j]
    for j in range(ids.size):
        weights[j] /= total


def _choose_kernel(at: Any) -> Any:
    def choose(a: Any) -> None:
        g = _read_choose(a)
        scores = carray(at(g.scores), (g.tokens, g.experts))
        weights = carray(f32_at(g.weights), (g.tokens, g.chosen))
        ids = carray(i32_at(g.ids), (g.tokens, g.chosen))
        left = np.empty(g.experts, np.float32)
        while True:
            token = take_next(a)
            if token >= g.tokens:
                break
            _choose_row(scores[token], g.sums_to_one, left, weights[token], ids[token])

    return choose


@Kernel
def _sort(a: Any) -> None:
    """Sort the rows by expert. One thread does all the work."""
    g = _read_sort(a)
    if take_next(a) == 0:
        num_rows = g.tokens * g.chosen
        ids = carray(i32_at(g.ids), num_rows)
        places, sources = carray(i32_at(g.places), num_rows), carray(i32_at(g.sources), num_rows)
        firsts = carray(i32_at(g.firsts), g.experts + 1)
        firsts[:] = 0
        for row in range(num_rows):
            firsts[ids[row] + 1] += 1
        for expert in range(g.experts):
            firsts[expert + 1] += firsts[expert]
        following = firsts.copy()
        for row in range(num_rows):
            place = following[ids[row]]
            following[ids[row]] += 1
            places[row], sources[place] = place, row // g.chosen


@njit(fastmath=FAST)
def _add_row(row: Any, weight: Any, total: Any) -> None:
    for i in range(row.size):
        total[i] += weight * widen(row[i])


def _combine_kernel(at: Any) -> Any:
    def combine(a: Any) -> None:
        g = _read_combine(a)
        shape = (g.tokens, g.size)
        y, out = carray(at(g.y), (g.tokens * g.chosen, g.size)), carray(at(g.out), shape)
        shared, gate = carray(at(g.shared), shape), carray(at(g.gate), g.tokens)
        weights = carray(f32_at(g.weights), (g.tokens, g.chosen))
        places = carray(i32_at(g.places), (g.tokens, g.chosen))
        total = np.empty(g.size, np.float32)
        while True:
            token = take_next(a)
            if token >= g.tokens:
                break
            total[:] = 0
            for j in range(g.chosen):
                _add_row(y[places[token, j]], weights[token, j], total)
            if g.shared:
                score = widen(gate[token])
                e = fast_exp(-abs(score))
                share = max(e, np.float32(score >= 0)) / (np.float32(1) + e)
                _add_row(shared[token], share, total)
            row = out[token]
            for i in range(row.size):
                row[i] = narrow(total[i], row[0])

    return combine


_CHOOSE, _COMBINE = for_each_type(_choose_kernel), for_each_type(_combine_kernel)


def route(scores: Tensor, num_chosen: int, sums_to_one: bool) -> Routing:
    """Choose the experts with the best scores for each token, weighted by softmax.

    scores: [tokens, experts].
    """
    tokens, experts = scores.shape
    weights = torch.empty((tokens, num_chosen), dtype=torch.float32)
    ids, places, sources = (torch.empty((tokens, num_chosen), dtype=torch.int32) for _ in range(3))
    firsts = torch.empty(experts + 1, dtype=torch.int32)
    pointers = scores.data_ptr(), weights.data_ptr(), ids.data_ptr()
    words = _Choose(tokens, experts, num_chosen, sums_to_one, *pointers)
    run = serial if tokens <= _FEW_TOKENS else parallel
    run(_CHOOSE[scores.dtype], arguments_of(*words))
    made = (part.data_ptr() for part in (ids, places, sources, firsts))
    serial(_sort, arguments_of(*_Sort(tokens, experts, num_chosen, *made)))
    return Routing(weights, ids, places, sources, firsts)


def combine(y: Tensor, routing: Routing, shared: Tensor | None, gate: Tensor | None) -> Tensor:
    """Return the weighted sum of each token's rows of y [tokens, chosen, size].

    `routing` has the places of the rows in y. If `shared` [tokens, size] is given, `shared` times
    the sigmoid of `gate` [tokens, 1] is added.
    """
    tokens, chosen, size = y.shape
    out = torch.empty((tokens, size), dtype=y.dtype)
    pointers = (part.data_ptr() for part in (y, routing.weights, routing.places))
    beside = (0 if part is None else part.data_ptr() for part in (shared, gate))
    words = _Combine._make((tokens, chosen, size, *pointers, *beside, out.data_ptr()))
    run = serial if tokens <= _FEW_TOKENS else parallel
    run(_COMBINE[y.dtype], arguments_of(*words))
    return out
