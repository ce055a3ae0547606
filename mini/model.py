"""Headrace-mini for training: the arithmetic of Qwen3 in little code; never used for serving."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Rotation = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Shape:
    vocab_size: int = 1536
    hidden: int = 160
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    mlp: int = 448
    rope_theta: float = 1_000_000.0
    max_positions: int = 4096
    norm_eps: float = 1e-6


class Norm(nn.Module):
    def __init__(self, size: int, eps: float, start: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), start))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


def rotation(shape: Shape, length: int) -> Rotation:
    """Return the cosines and sines of rotary positions, each [length, 1, head_dim]."""
    exponents = torch.arange(0, shape.head_dim, 2) / shape.head_dim
    angles = torch.outer(torch.arange(length).float(), shape.rope_theta**-exponents)
    angles = torch.cat((angles, angles), dim=-1).unsqueeze(1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, turn: Rotation) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * turn[0] + torch.cat((-right, left), dim=-1) * turn[1]


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        s = self.shape = shape
        self.input_norm = Norm(s.hidden, s.norm_eps)
        self.q = nn.Linear(s.hidden, s.num_heads * s.head_dim, bias=False)
        self.k = nn.Linear(s.hidden, s.num_kv_heads * s.head_dim, bias=False)
        self.v = nn.Linear(s.hidden, s.num_kv_heads * s.head_dim, bias=False)
        self.o = nn.Linear(s.num_heads * s.head_dim, s.hidden, bias=False)
        # More than one, because a copying head must find one key among two thousand.
        self.q_norm = Norm(s.head_dim, s.norm_eps, start=1.5)
        self.k_norm = Norm(s.head_dim, s.norm_eps, start=1.5)
        self.post_norm = Norm(s.hidden, s.norm_eps)
        self.gate = nn.Linear(s.hidden, s.mlp, bias=False)
        self.up = nn.Linear(s.hidden, s.mlp, bias=False)
        self.down = nn.Linear(s.mlp, s.hidden, bias=False)

    def attend(self, x: Tensor, turn: Rotation) -> Tensor:
        s, (rows, length, _) = self.shape, x.shape
        q = self.q_norm(self.q(x).view(rows, length, s.num_heads, s.head_dim))
        k = self.k_norm(self.k(x).view(rows, length, s.num_kv_heads, s.head_dim))
        v = self.v(x).view(rows, length, s.num_kv_heads, s.head_dim)
        groups = s.num_heads // s.num_kv_heads
        k, v = (t.repeat_interleave(groups, dim=2) for t in (rotate(k, turn), v))
        q, k, v = (t.transpose(1, 2) for t in (rotate(q, turn), k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(out.transpose(1, 2).reshape(rows, length, -1))

    def forward(self, x: Tensor, turn: Rotation) -> Tensor:
        x = x + self.attend(self.input_norm(x), turn)
        y = self.post_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Mini(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocab_size, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = Norm(shape.hidden, shape.norm_eps)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                quiet = name.endswith(("o.weight", "down.weight"))
                nn.init.normal_(weight, std=0.007 if quiet else 0.05 if "embed" in name else 0.02)

    def forward(self, ids: Tensor, turn: Rotation) -> Tensor:
        """Return the last layer's output before the head, [rows, length, hidden]."""
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, turn)
        return self.norm(x)

    def loss(self, ids: Tensor, targets: Tensor, turn: Rotation) -> Tensor:
        """Return the mean cross entropy of the targets that are not negative.

        The head is computed only at these positions.
        """
        x, wanted = self.forward(ids, turn).flatten(0, 1), targets.flatten()
        at = (wanted >= 0).nonzero().squeeze(1)
        return F.cross_entropy(F.linear(x[at], self.embed.weight), wanted[at])
