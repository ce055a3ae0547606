"""What a model needs of a step: positions, and an attention over all that was computed before."""

from typing import Protocol

import msgspec
from torch import Tensor


class Step(Protocol):
    """One step's packed tokens, as the layers see them."""

    positions: Tensor  # int64 [tokens]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Writes k and v into block memory, then attends from q to all positions up to its own.

        q: [tokens, heads, dim], k and v: [tokens, kv_heads, dim]; returns [tokens, heads, dim].
        Scores are scaled by dim ** -0.5.
        """
        ...


class CacheShape(msgspec.Struct, frozen=True):
    """Keys and values that one position takes, and how far back each layer looks."""

    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]  # per layer: positions visible, its own included; None: all

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def values_per_position(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim
