"""The step as a model sees it: positions, and access to what was computed before."""

from typing import Protocol

from torch import Tensor, nn


class Linears(Protocol):
    """How the linear layers of a step's rows are computed."""

    def linear(self, layer: nn.Module, x: Tensor) -> Tensor:
        """The layer's own result for x [tokens, inputs], plus what adapters of its rows add."""
        ...


class BareLinears:
    """Linear layers that no adapter changes, such as those of experts."""

    def linear(self, layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x)


BARE = BareLinears()


class Step(Linears, Protocol):
    """One step's packed tokens, as the layers see them."""

    positions: Tensor  # int64 [tokens]; [3, tokens]: time, row and column of each

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, cap: float | None = None
    ) -> Tensor:
        """Writes k and v into block memory, then attends from q to all positions up to its own.

        q: [tokens, heads, key_dim], k: [tokens, kv_heads, key_dim], v: [tokens, kv_heads,
        value_dim]; returns [tokens, heads, value_dim]. Scores are scaled by key_dim ** -0.5; with a
        cap they become cap * tanh(score / cap).
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
