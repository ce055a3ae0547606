"""Layers that the dense families share: norm, rotary positions, gated MLP."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace.models.rope import frequencies
from headrace.models.text_config import TextConfig


class Embedding(nn.Module):
    """Rows of a table [num, size]. torch's own imports its compiler to draw values for it."""

    def __init__(self, num: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num, size))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Rotation:
    """The rotations of a step's positions: cosines and sines, float32 [tokens, 1, dim]."""

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self.cos, self.sin = cos, sin

    def __call__(self, x: Tensor) -> Tensor:
        """Turns x [tokens, heads, dim] by its positions, always in float32."""
        left, right = x.chunk(2, dim=-1)
        return (x * self.cos + torch.cat((-right, left), dim=-1) * self.sin).to(x.dtype)


class Rotary(nn.Module):
    """Positions as rotations of pairs (j, j + dim/2), one frequency a pair (Su et al., 2021)."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        table, self.amplitude = frequencies(config.rope, config.head_dim)
        self.frequencies = nn.Buffer(table, persistent=False)  # [dim/2]

    def forward(self, positions: Tensor) -> Rotation:
        angles = positions[:, None].float() * self.frequencies  # [tokens, dim/2]
        angles = torch.cat((angles, angles), dim=-1)[:, None]  # [tokens, 1, dim]
        return Rotation(angles.cos() * self.amplitude, angles.sin() * self.amplitude)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up in one product."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        bias = config.has_mlp_bias
        self.gate_up = nn.Linear(config.hidden_size, 2 * config.mlp_size, bias=bias)
        self.down = nn.Linear(config.mlp_size, config.hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)
