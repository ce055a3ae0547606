"""Describes how many numbers each layer of a model caches for a sequence."""

from math import prod
from typing import Literal

import msgspec

KvCacheDtype = Literal["auto", "int8"]
"""The format of keys and values; auto: the format in which the model computes."""


class LayerCache(msgspec.Struct, frozen=True):
    """Counts the numbers that one layer caches for a sequence.

    Keys and values of each position are stored in blocks. `state` and `inputs` exist once per
    sequence, in the sequence's slot. A size of 0 means that the layer has no such numbers.
    """

    num_kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    # Each token attends to this many positions, its own included. None means all positions.
    window: int | None = None
    state: tuple[int, int, int] = (0, 0, 0)  # float32 [heads, key_dim, value_dim]
    inputs: tuple[int, int] = (0, 0)  # [inputs, channels]: the last inputs of a convolution


ModelCache = tuple[LayerCache, ...]
"""The cache of a model, layer by layer."""

SCALE_BYTES = 4
"""The bytes of the float32 scale of a key or a value in an int8 cache."""
_STATE_BYTES = 4  # bytes of a float32


def bytes_per_position(
    cache: ModelCache, number_bytes: int, kv_cache_dtype: KvCacheDtype = "auto"
) -> int:
    """Return the bytes of one position's keys and values in all layers.

    number_bytes: the bytes of a number in the format in which the model computes.
    """
    sizes = [(each.num_kv_heads, dim) for each in cache for dim in (each.key_dim, each.value_dim)]
    return sum(num * row_bytes(dim, number_bytes, kv_cache_dtype) for num, dim in sizes)


def row_bytes(dim: int, number_bytes: int, kv_cache_dtype: KvCacheDtype) -> int:
    """Return the bytes of a key or a value of `dim` numbers, with its scale if it has one."""
    return dim + SCALE_BYTES if kv_cache_dtype == "int8" else dim * number_bytes


def bytes_per_slot(cache: ModelCache, number_bytes: int) -> int:
    """Return the bytes of one sequence's slot; 0 if the model needs no slots."""
    return sum(prod(each.state) * _STATE_BYTES + prod(each.inputs) * number_bytes for each in cache)
