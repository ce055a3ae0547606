"""Layers that the families share: norms, rotary positions, gates, convolution, gated MLP."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headrace_engine.models.rope import frequencies, interleaved_axes
from headrace_engine.models.step import Linears, Step
from headrace_engine.models.text_config import TextConfig


class Embedding(nn.Module):
    """Looks up rows of a table [num, size].

    Replaces nn.Embedding, which imports torch's compiler just to initialize its values.
    """

    def __init__(self, num: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num, size))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.weight)


class ScaledEmbedding(Embedding):
    """An embedding whose rows are multiplied by the square root of `scale_of`.

    By default, this is the size of a row.

    The factor is rounded to the dtype of the rows, as in the original implementation.
    """

    def __init__(self, num: int, size: int, scale_of: int | None = None) -> None:
        super().__init__(num, size)
        self.root = (scale_of or size) ** 0.5

    def forward(self, ids: Tensor) -> Tensor:
        root = self.root
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


class UnitNorm(nn.Module):
    """RMSNorm without weights."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.size, self.eps = size, eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (self.size,), eps=self.eps)


class ShiftedNorm(_WeightedNorm):
    """RMSNorm whose stored weights are the actual weights minus 1."""

    def forward(self, x: Tensor) -> Tensor:
        weight = 1 + self.weight.float()
        return F.rms_norm(x.float(), weight.shape, weight, self.eps).to(x.dtype)


class GatedNorm(_WeightedNorm):
    """Computes RMSNorm(x) * silu(gate). x and gate are [tokens, heads, size], and x is float32."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        normed = F.rms_norm(x, self.weight.shape, self.weight.float(), self.eps)
        return (normed * F.silu(gate.float())).to(gate.dtype)


class SigmoidGate(nn.Module):
    """Multiplies x [tokens, heads, dim] by the sigmoid of a gate of the same shape."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return x * gate.sigmoid()


class Rotation:
    """Rotates queries and keys by the positions of a step.

    `cos` and `sin` are float32 [tokens, 1, rotary_dim].
    """

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self.cos, self.sin = cos, sin

    def __call__(self, x: Tensor) -> Tensor:
        """Rotate the first rotary_dim numbers of each head; x is [tokens, heads, dim].

        The rotation is computed in float32.
        """
        size = self.cos.shape[-1]
        x, rest = x[..., :size], x[..., size:]
        left, right = x.chunk(2, dim=-1)
        rotated = (x * self.cos + torch.cat((-right, left), dim=-1) * self.sin).to(x.dtype)
        return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated


class Rotary(nn.Module):
    """Encodes positions by rotating the pairs (j, j + rotary_dim/2), each at its own frequency.

    Su et al., "RoFormer" (2021).
    """

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        table, self.amplitude = frequencies(config.rope, config.rotary_dim)
        self.frequencies = nn.Buffer(table, persistent=False)  # [rotary_dim/2]
        self.axes = nn.Buffer(interleaved_axes(config.rope, config.rotary_dim), persistent=False)

    def angles(self, positions: Tensor) -> Tensor:
        """Return the angles, float32 [tokens, rotary_dim/2].

        positions: [tokens], or [3, tokens] with the time, row and column of each token.
        """
        each = positions.T[:, self.axes] if positions.ndim == 2 else positions[:, None]
        return (each.float() * self.frequencies).contiguous()

    def forward(self, positions: Tensor) -> Rotation:
        angles = self.angles(positions)
        angles = torch.cat((angles, angles), dim=-1)[:, None]  # [tokens, 1, rotary_dim]
        return Rotation(angles.cos() * self.amplitude, angles.sin() * self.amplitude)


class GatedMLP(nn.Module):
    """Computes down(silu(gate(x)) * up(x)), with gate and up in one matrix product."""

    def __init__(self, config: TextConfig) -> None:
        super().__init__()
        bias = config.has_mlp_bias
        self.gate_up = nn.Linear(config.hidden_size, 2 * config.mlp_size, bias=bias)
        self.down = nn.Linear(config.mlp_size, config.hidden_size, bias=bias)

    def forward(self, x: Tensor, step: Linears) -> Tensor:
        gate, up = step.linear(self.gate_up, x).chunk(2, dim=-1)
        return step.linear(self.down, F.silu(gate) * up)


class GeluMLP(GatedMLP):
    """A GatedMLP with the tanh approximation of gelu in place of silu."""

    def forward(self, x: Tensor, step: Linears) -> Tensor:
        gate, up = step.linear(self.gate_up, x).chunk(2, dim=-1)
        return step.linear(self.down, F.gelu(gate, approximate="tanh") * up)


class ClampedMLP(GatedMLP):
    """Computes down(gate * sigmoid(alpha * gate) * (up + 1)); `limit` clamps gate and up."""

    alpha, limit = 1.702, 7.0

    def forward(self, x: Tensor, step: Linears) -> Tensor:
        gate, up = step.linear(self.gate_up, x).chunk(2, dim=-1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return step.linear(self.down, gate * (self.alpha * gate).sigmoid() * (up + 1))


class Convolution(nn.Module):
    """Convolves each channel separately over its last `width` inputs (see Step.convolve)."""

    def __init__(self, layer: int, num_channels: int, width: int) -> None:
        super().__init__()
        self.layer = layer
        self.weight = nn.Parameter(torch.empty(num_channels, 1, width))

    def forward(self, x: Tensor, step: Step) -> Tensor:
        return step.convolve(self.layer, x, self.weight[:, 0].T)


class DeltaGates(nn.Module):
    """Computes how much of its state each head keeps and how strongly it corrects the state."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.empty(num_heads))
        self.dt_bias = nn.Parameter(torch.empty(num_heads))

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        """Return decay and beta, two float32 tensors [tokens, heads]. Decay is a logarithm."""
        rate = F.softplus(a.float() + self.dt_bias.float())
        return -self.A_log.float().exp() * rate, b.float().sigmoid()
