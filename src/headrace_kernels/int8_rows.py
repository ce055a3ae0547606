"""Rounds keys and values to int8 in plain torch: the reference for the kernels of an int8 cache."""

import torch
from torch import Tensor

SCALE_BYTES = 4  # a float32
LARGEST_BYTE = 127
LEAST_SIZE = 1e-30
"""A row whose numbers are all smaller is stored as zeros, because 127 / size could overflow."""


def quantize_rows(x: Tensor) -> Tensor:
    """Return x [..., dim] as int8 [..., dim + 4]: rounded numbers, then the row's float32 scale.

    The largest number of a row becomes 127 or -127. The kernels compute the same bytes.
    """
    x = x.float()
    size = x.abs().amax(-1, keepdim=True)
    size = size.masked_fill(size < LEAST_SIZE, 0)
    # Torch would compute 127 / size as 127 * (1 / size), which the kernels round differently.
    by = (torch.full_like(size, LARGEST_BYTE) / size).masked_fill(size == 0, 0)
    scale = (size / LARGEST_BYTE).view(torch.int8)
    return torch.cat(((x * by).round().to(torch.int8), scale), dim=-1)


def dequantize_rows(rows: Tensor) -> Tensor:
    """Return the float32 numbers [..., dim] of rows [..., dim + 4] from `quantize_rows`."""
    numbers, scale = rows.split((rows.shape[-1] - SCALE_BYTES, SCALE_BYTES), dim=-1)
    return numbers.float() * scale.contiguous().view(torch.float32)
