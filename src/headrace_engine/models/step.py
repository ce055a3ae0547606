"""Defines what models see of a step: positions, the cache, and linear layers with adapters."""

from typing import Protocol

from torch import Tensor, nn


class Linears(Protocol):
    """Computes linear layers for the rows of a step."""

    def linear(self, layer: nn.Module, x: Tensor) -> Tensor:
        """Return layer(x) for x [tokens, inputs], plus what the adapter of each row adds."""


class BareLinears:
    """Computes linear layers that no adapter changes, such as the linear layers of experts."""

    def linear(self, layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x)


BARE = BareLinears()


class Step(Linears, Protocol):
    """The packed tokens of one step, and the operations of layers that use the cache."""

    # int64 [tokens], or [3, tokens] with the time, row and column of each token.
    positions: Tensor

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, cap: float | None = None
    ) -> Tensor:
        """Write k and v into the cache; then each row of q attends to all positions up to its own.

        q: [tokens, heads, key_dim], k: [tokens, kv_heads, key_dim], v: [tokens, kv_heads,
        value_dim]; returns [tokens, heads, value_dim]. Scores are scaled by key_dim ** -0.5. With a
        cap, scores become cap * tanh(score / cap).
        """

    def convolve(self, layer: int, x: Tensor, weight: Tensor) -> Tensor:
        """Return silu of each channel's weighted sum over its last `width` inputs.

        The last weight belongs to the newest input. x: [tokens, channels], weight: [width,
        channels]; returns float32 [tokens, channels].
        """

    def delta_rule(
        self, layer: int, qkv: tuple[Tensor, Tensor, Tensor], decay: Tensor, beta: Tensor
    ) -> Tensor:
        """Update the layer's state by each token and return its outputs (see delta_rule.py).

        q and k: [tokens, key_heads, key_dim], v: [tokens, value_heads, value_dim]; decay (a
        logarithm) and beta: [tokens, value_heads]. The result has the shape of v. All are float32.
        """
