"""The step as a model sees it: positions, and access to what was computed before."""

from typing import Protocol

import msgspec
from torch import Tensor


class Step(Protocol):
    """One step's packed tokens, as the layers see them."""

    positions: Tensor  # int64 [tokens]; [3, tokens]: time, row and column of each

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Writes k and v into block memory, then attends from q to all positions up to its own.

        q: [tokens, heads, dim], k and v: [tokens, kv_heads, dim]; returns [tokens, heads, dim].
        Scores are scaled by dim ** -0.5.
        """
        ...

    def convolve(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        """silu of each channel's weighed sum over its last inputs, the newest weighed by the last.

        x: [tokens, channels], weight: [width, channels]; returns float32 [tokens, channels].
        """
        ...

    def delta_rule(
        self, layer: int, qkv: tuple[Tensor, Tensor, Tensor], decay: Tensor, beta: Tensor
    ) -> Tensor:
        """Moves the layer's state on by each token (models/delta_rule.py) and reads it.

        q and k: [tokens, key_heads, key_dim], v: [tokens, value_heads, value_dim]; decay (its
        logarithm) and beta: [tokens, value_heads]. All, and what is returned like v, are float32.
        """
        ...


class StateShape(msgspec.Struct, frozen=True):
    """The recurrent state of a sequence: per layer a matrix for each head, and a few inputs."""

    num_layers: int
    num_heads: int  # of values
    key_dim: int
    value_dim: int
    num_channels: int  # of the convolution
    num_inputs: int  # that it looks back at, the newest not included


class CacheShape(msgspec.Struct, frozen=True):
    """Keys and values that one position takes, and how far back each layer looks."""

    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]  # per layer: positions visible, its own included; None: all
    state: StateShape | None = None  # of layers that keep no position

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def values_per_position(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim
