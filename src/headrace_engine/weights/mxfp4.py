"""MXFP4 as safetensors hold it: bytes of two codes in one tensor, the groups' scales in another.

A group is 32 neighbours in a row. A code is a sign and one of 0, 1/2, 1, 3/2, 2, 3, 4, 6, and a
scale is a power of two: the byte e stands for 2^(e - 127).
"""

import torch
from torch import Tensor

from headrace_engine.weights.gguf_groups import Groups

_TWICE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def codes_of(blocks: Tensor) -> Tensor:
    """int8 [rows, values] of blocks, uint8 [rows, groups, 16]: the lower half of a byte first."""
    return torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(1).to(torch.int8)


def values_of(blocks: Tensor, scales: Tensor) -> Tensor:
    """float32 [rows, values], exact; scales: uint8 [rows, groups]."""
    doubled = torch.tensor(_TWICE, dtype=torch.float32)[codes_of(blocks).long()]
    grouped = doubled.unflatten(1, (*scales.shape[1:], -1))
    return torch.ldexp(grouped, scales[..., None].to(torch.int32) - 128).flatten(1)


def copy_groups(blocks: Tensor, scales: Tensor, target: Groups) -> None:
    target.q.copy_(codes_of(blocks))
    target.scale.copy_(scales)
