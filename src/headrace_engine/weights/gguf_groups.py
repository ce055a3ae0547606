"""Reads quantized values of GGUF files without rounding: groups of integers with a scale.

A value is scale * q + minimum. GGUF's K types also quantize the scales and minima; this module
returns the dequantized scales and minima. For MXFP4, q has codes and the scales are bytes (see
mxfp4.py).
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf.quants import Q4_K, dequantize
from torch import Tensor

from headrace_common.checkpoints.gguf_header import TYPES

Array = np.ndarray[Any, np.dtype[Any]]


class GroupScheme(NamedTuple):
    """The format of groups: 4-bit values from 0 with a minimum, 8-bit signed values, or MXFP4."""

    bits: int
    # How many consecutive values share a scale.
    size: int
    has_minimum: bool
    # Whether q has MXFP4 codes.
    is_float: bool = False


class Groups(NamedTuple):
    """A quantized matrix: q int8 [rows, values]; scale and minimum float16 [rows, groups].

    For MXFP4, q has codes, the scales are uint8 and the minimum is empty.
    """

    scheme: GroupScheme
    q: Tensor
    scale: Tensor
    minimum: Tensor


_FOUR, _EIGHT = GroupScheme(4, 32, True), GroupScheme(8, 32, False)
GROUP_SCHEMES = {
    "Q4_0": _FOUR,
    "Q4_1": _FOUR,
    "Q4_K": _FOUR,
    "Q5_0": _EIGHT,
    "Q5_1": GroupScheme(8, 32, True),
    "Q5_K": GroupScheme(8, 32, True),
    "Q6_K": GroupScheme(8, 16, False),
    "Q8_0": _EIGHT,
    "MXFP4": GroupScheme(4, 32, has_minimum=False, is_float=True),
}
"""For each GGUF type, the smallest scheme that holds the type's values exactly."""

_ONE, _ZERO = np.float16(1).tobytes(), bytes(2)
_ONES_OF_K = _ONE + _ZERO + bytes([1] * 4 + [0] * 4 + [1] * 4)
_SCALES_IN_BLOCK = {
    "Q4_0": (0, _ONE),
    "Q4_1": (0, _ONE + _ZERO),
    "Q4_K": (0, _ONES_OF_K),
    "Q5_0": (0, _ONE),
    "Q5_1": (0, _ONE + _ZERO),
    "Q5_K": (0, _ONES_OF_K),
    "Q6_K": (192, bytes([1] * 16) + _ONE),
    "Q8_0": (0, _ONE),
}
"""Where a block has its scales and minima (a byte offset), and the bytes for scale 1, minimum 0."""
_BLOCK_BYTES = {name: size for name, _, size in TYPES.values()}


def common_scheme(kinds: Iterable[str]) -> GroupScheme | None:
    """Return the scheme that holds all of these types exactly, or None."""
    schemes = [GROUP_SCHEMES.get(kind) for kind in kinds]
    if not schemes or None in schemes:
        return None
    bits, sizes, minima, are_floats = zip(*schemes, strict=True)
    if any(are_floats):
        return schemes[0] if all(are_floats) else None
    return GroupScheme(max(bits), min(sizes), any(minima))


def empty_groups(scheme: GroupScheme, num_rows: int, num_values: int) -> Groups:
    q = torch.empty((num_rows, num_values), dtype=torch.int8)
    size = num_rows, num_values // scheme.size
    if scheme.is_float:
        return Groups(scheme, q, torch.empty(size, dtype=torch.uint8), torch.empty(num_rows, 0))
    scale, minimum = (torch.empty(size, dtype=torch.float16) for _ in range(2))
    return Groups(scheme, q, scale, minimum)


def read_groups(raw: Array, kind: str) -> tuple[Array, Array, Array]:
    """Decode raw bytes [rows, bytes] to q [rows, values], scale and minimum [rows, groups].

    All results are float32, except for MXFP4 (see `Groups`). To get q, the scales in a copy of the
    bytes are set to 1 and the minima to 0. Then `dequantize` returns the bare integers.
    """
    rows, scheme = len(raw), GROUP_SCHEMES[kind]
    blocks = raw.reshape(-1, _BLOCK_BYTES[kind])
    if scheme.is_float:
        codes = np.concatenate((blocks[:, 1:] & 15, blocks[:, 1:] >> 4), axis=1).view(np.int8)
        scale = blocks[:, :1].reshape(rows, -1)
        return codes.reshape(rows, -1), scale, np.empty((rows, 0), np.float32)
    offset, ones = _SCALES_IN_BLOCK[kind]
    plain = blocks.copy()
    plain[:, offset : offset + len(ones)] = np.frombuffer(ones, np.uint8)
    q = dequantize(plain.reshape(rows, -1), GGMLQuantizationType[kind])
    if kind == "Q4_0":
        q += 8
    scale, minimum = _scale_and_minimum(blocks, kind)
    num_groups = q.shape[1] // scheme.size
    return q, scale.reshape(rows, num_groups), minimum.reshape(rows, num_groups)


def _scale_and_minimum(blocks: Array, kind: str) -> tuple[Array, Array]:
    if kind == "Q6_K":
        scale = _half(blocks, 208) * blocks[:, 192:208].view(np.int8)
        return scale, np.zeros_like(scale)
    scale = _half(blocks, 0)
    if kind in ("Q4_K", "Q5_K"):
        scales, minima = Q4_K.get_scale_min(blocks[:, 4:16])
        return scale * scales, _half(blocks, 2) * -minima.astype(np.float32)
    if kind in ("Q4_1", "Q5_1"):
        return scale, _half(blocks, 2)
    return scale, scale * (-8 if kind == "Q4_0" else 0)


def _half(blocks: Array, offset: int) -> Array:
    """Return the float16 at byte `offset` of each block, as float32 [blocks, 1]."""
    return np.ascontiguousarray(blocks[:, offset : offset + 2]).view(np.float16).astype(np.float32)
