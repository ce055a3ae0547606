"""Measures the limits of the machine: the speed of reading memory and of multiplying."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import torch
from numba import njit

# Far more bytes than any cache holds.
_READ_BYTES = 1 << 29
# The number of rows and columns of the multiplied matrices.
_SIZE = 2048
# The longest time in seconds per figure and round.
_SECONDS = 0.5
# Values per piece. Reading a piece of this size takes far longer than scheduling it.
_PIECE = 1 << 21


class Machine(msgspec.Struct, frozen=True):
    """The rates of the machine that bound every step; each is the best of several measurements."""

    read_bytes_per_s: float
    bf16_ops_per_s: float
    int8_ops_per_s: float
    float32_ops_per_s: float

    def best_of(self, other: "Machine") -> "Machine":
        pairs = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(other), strict=True)
        return Machine(*(max(pair) for pair in pairs))

    def ops_per_s(self, dtype: str) -> float:
        """Return the rate that products of this type can reach.

        Every type can be converted to float32, so the rate of float32 is a lower bound.
        """
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
    """Return the read rate. Idle threads fetch the next piece, so slow cores get fewer pieces."""
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
