"""A model's cache as data: what its layers keep of a sequence, in numbers; no bytes, no tensors."""

from math import prod

import msgspec


class LayerCache(msgspec.Struct, frozen=True):
    """The numbers that one layer keeps of a sequence: of each position, of the whole, or none.

    Those of positions lie in blocks, the others in the sequence's slot. A size of 0: none are kept.
    """

    num_kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    window: int | None = None  # positions visible, the own one included; None: all
    state: tuple[int, int, int] = (0, 0, 0)  # float32 [heads, key_dim, value_dim], a matrix each
    inputs: tuple[int, int] = (0, 0)  # [inputs, channels]: the last ones of a convolution


ModelCache = tuple[LayerCache, ...]
"""A cache of a model: layer by layer."""

_STATE_BYTES = 4  # of a number of a state, whatever the model's own have


def bytes_per_position(cache: ModelCache, number_bytes: int) -> int:
    numbers = sum(each.num_kv_heads * (each.key_dim + each.value_dim) for each in cache)
    return numbers * number_bytes


def bytes_per_slot(cache: ModelCache, number_bytes: int) -> int:
    """0 if no layer keeps anything of a sequence as a whole: then it needs no slot."""
    return sum(prod(each.state) * _STATE_BYTES + prod(each.inputs) * number_bytes for each in cache)
