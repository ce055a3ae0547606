"""Describes how many numbers each layer of a model caches for a sequence."""

from math import prod

import msgspec


class LayerCache(msgspec.Struct, frozen=True):
    """The numbers that one layer caches for a sequence, as counts.

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

_STATE_BYTES = 4  # bytes of a float32


def bytes_per_position(cache: ModelCache, number_bytes: int) -> int:
    numbers = sum(each.num_kv_heads * (each.key_dim + each.value_dim) for each in cache)
    return numbers * number_bytes


def bytes_per_slot(cache: ModelCache, number_bytes: int) -> int:
    """Return the bytes of one sequence's slot; 0 if the model needs no slots."""
    return sum(prod(each.state) * _STATE_BYTES + prod(each.inputs) * number_bytes for each in cache)
