"""Unpacks MXFP4 as safetensors files store it: packed codes in one tensor, scales in another.

A byte packs two codes. A group is 32 consecutive values of a row that share a scale. A code is a
sign and one of 0, 1/2, 1, 3/2, 2, 3, 4, 6. The byte e stands for the scale 2^(e - 127).
"""

import torch
from torch import Tensor

from headrace_engine.weights.gguf_groups import Groups

_TWICE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def codes_of(blocks: Tensor) -> Tensor:
    """Return int8 [rows, values] from uint8 [rows, groups, 16]; a byte's low half is first."""
    return torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(1).to(torch.int8)


def values_of(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the exact values, float32 [rows, values]; scales: uint8 [rows, groups]."""
    doubled = torch.tensor(_TWICE, dtype=torch.float32)[codes_of(blocks).long()]
    grouped = doubled.unflatten(1, (*scales.shape[1:], -1))
    return torch.ldexp(grouped, scales[..., None].to(torch.int32) - 128).flatten(1)


def copy_groups(blocks: Tensor, scales: Tensor, target: Groups) -> None:
    target.q.copy_(codes_of(blocks))
    target.scale.copy_(scales)
