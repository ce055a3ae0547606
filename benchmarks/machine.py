"""The machine's own limits: how fast it reads memory, and how fast it multiplies."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import torch
from numba import njit

_READ_BYTES = 1 << 29  # far more than any cache holds
_SIZE = 2048  # rows and columns of the matrices that are multiplied
_SECONDS = 0.5  # at most, per figure and round
_PIECE = 1 << 21  # numbers: reading them takes far longer than to hand them out


class Machine(msgspec.Struct, frozen=True):
    """The floor under every step; rates are of the best of all ways that were tried."""

    read_bytes_per_s: float
    bf16_ops_per_s: float
    int8_ops_per_s: float
    float32_ops_per_s: float

    def best_of(self, other: "Machine") -> "Machine":
        pairs = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True)
        return Machine(*(max(pair) for pair in pairs))

    def ops_per_s(self, dtype: str) -> float:
        """The speed that products of that type can reach: widening to float32 is open to all."""
        own = {"bfloat16": self.bf16_ops_per_s, "int8": self.int8_ops_per_s}.get(dtype, 0.0)
        return max(own, self.float32_ops_per_s)


def measure() -> Machine:
    return Machine(
        read_bytes_per_s=_read_rate(),
        bf16_ops_per_s=_product_rate(torch.bfloat16),
        int8_ops_per_s=_int8_rate(),
        float32_ops_per_s=_product_rate(torch.float32),
    )


def _shortest(run: Callable[[], Any]) -> float:
    run()
    best, end = float("inf"), time.perf_counter() + _SECONDS
    while time.perf_counter() < end:
        began = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - began)
    return best


@njit(nogil=True)
def _sum(values: Any) -> Any:
    total = np.int32(0)
    for i in range(values.size):
        total += values[i]
    return total


def _read_rate() -> float:
    """Threads take pieces as they come, so that a slow core takes fewer."""
    values = np.ones(_READ_BYTES // 4, np.int32)
    pieces = [values[first : first + _PIECE] for first in range(0, values.size, _PIECE)]
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        return values.nbytes / _shortest(lambda: list(threads.map(_sum, pieces)))


def _product_rate(dtype: torch.dtype) -> float:
    left, right = torch.ones(_SIZE, _SIZE).to(dtype), torch.ones(_SIZE, _SIZE).to(dtype)
    return 2 * _SIZE**3 / _shortest(lambda: torch.mm(left, right))


def _int8_rate() -> float:
    left = torch.ones(_SIZE, _SIZE, dtype=torch.int8)
    return 2 * _SIZE**3 / _shortest(lambda: torch._int_mm(left, left.t()))
