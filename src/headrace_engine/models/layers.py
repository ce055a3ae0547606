"""Layers that the families share: norms, rotary positions, gates, convolution, gated MLP."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace_engine.models.rope import frequencies, interleaved_axes
from headrace_engine.models.step import Linears, Step
from headrace_engine.models.text_config import TextConfig


class Embedding(nn.Module):
    """Rows of a table [num, size]. torch's own imports its compiler to draw values for it."""

    def __init__(self, num: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num, size))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class ScaledEmbedding(Embedding):
    """The same times the root of a row's size, rounded as the rows are."""

    def forward(self, ids: Tensor) -> Tensor:
        root = self.weight.shape[1] ** 0.5
        step = torch.finfo(self.weight.dtype).eps * 2 ** (math.frexp(root)[1] - 1)
        return super().forward(ids) * (round(root / step) * step)


class _WeightedNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps


class RMSNorm(_WeightedNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class ShiftedNorm(_WeightedNorm):
    """RMSNorm whose weights are kept less 1."""

    def forward(self, x: Tensor) -> Tensor:
        weight = 1 + self.weight.float()
        return F.rms_norm(x.float(), weight.shape, weight, self.eps).to(x.dtype)


class GatedNorm(_WeightedNorm):
    """RMSNorm of float32 x [tokens, heads, size], times silu of a gate of that shape."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        normed = F.rms_norm(x, self.weight.shape, self.weight.float(), self.eps)
        return (normed * F.silu(gate.float())).to(gate.dtype)


class SigmoidGate(nn.Module):
    """x times the sigmoid of a gate of its shape [tokens, heads, dim]."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return x * gate.sigmoid()


class Rotation:
    """The rotations of a step's positions: cosines and sines, float32 [tokens, 1, turned]."""

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self.cos, self.sin = cos, sin

    def __call__(self, x: Tensor) -> Tensor:
        """Turns the first numbers of x [tokens, heads, dim] by its positions, in float32."""
        size = self.cos.shape[-1]
        x, rest = x[..., :size], x[..., size:]
        left, right = x.chunk(2, dim=-1)
        turned = (x * self.cos + torch.cat((-right, left), dim=-1) * self.sin).to(x.dtype)
        return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


class Rotary(nn.Module):
    """Positions as rotations of pairs (j, j + turned/2), one frequency each (Su et al., 2021)."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        table, self.amplitude = frequencies(config.rope, config.rotary_dim)
        self.frequencies = nn.Buffer(table, persistent=False)  # [turned/2]
        self.axes = nn.Buffer(interleaved_axes(config.rope, config.rotary_dim), persistent=False)

    def angles(self, positions: Tensor) -> Tensor:
        """float32 [tokens, turned/2] of positions [tokens], or of those on three axes."""
        each = positions.T[:, self.axes] if positions.ndim == 2 else positions[:, None]
        return (each.float() * self.frequencies).contiguous()

    def forward(self, positions: Tensor) -> Rotation:
        angles = self.angles(positions)
        angles = torch.cat((angles, angles), dim=-1)[:, None]  # [tokens, 1, turned]
        return Rotation(angles.cos() * self.amplitude, angles.sin() * self.amplitude)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), gate and up in one product."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        bias = config.has_mlp_bias
        self.gate_up = nn.Linear(config.hidden_size, 2 * config.mlp_size, bias=bias)
        self.down = nn.Linear(config.mlp_size, config.hidden_size, bias=bias)

    def forward(self, x: Tensor, step: Linears) -> Tensor:
        gate, up = step.linear(self.gate_up, x).chunk(2, dim=-1)
        return step.linear(self.down, F.silu(gate) * up)


class GeluMLP(GatedMLP):
    """The same by gelu, which is computed by a tanh."""

    def forward(self, x: Tensor, step: Linears) -> Tensor:
        gate, up = step.linear(self.gate_up, x).chunk(2, dim=-1)
        return step.linear(self.down, F.gelu(gate, approximate="tanh") * up)


class ClampedMLP(GatedMLP):
    """The same by silu of a steeper gate, both halves clamped, and up raised by 1."""

    alpha, limit = 1.702, 7.0

    def forward(self, x: Tensor, step: Linears) -> Tensor:
        gate, up = step.linear(self.gate_up, x).chunk(2, dim=-1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return step.linear(self.down, gate * (self.alpha * gate).sigmoid() * (up + 1))


class Convolution(nn.Module):
    """Each channel by itself over its last `width` inputs (Step.convolve)."""

    def __init__(self, layer: int, num_channels: int, width: int) -> None:
        super().__init__()
        self.layer = layer
        self.weight = nn.Parameter(torch.empty(num_channels, 1, width))

    def forward(self, x: Tensor, step: Step) -> Tensor:
        return step.convolve(self.layer, x, self.weight[:, 0].T)


class DeltaGates(nn.Module):
    """How much of its state each head keeps (as a logarithm), and how much it corrects it."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.empty(num_heads))
        self.dt_bias = nn.Parameter(torch.empty(num_heads))

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """float32 [tokens, heads] each."""
        rate = F.softplus(a.float() + self.dt_bias.float())
        return -self.A_log.float().exp() * rate, b.float().sigmoid()
