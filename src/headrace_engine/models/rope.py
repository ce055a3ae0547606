"""Computes the frequencies of rotary positions, plain or scaled to a longer context."""

import math

import torch
from torch import Tensor

from headrace_engine.models.text_config import Rope


def frequencies(rope: Rope, dim: int) -> tuple[Tensor, float]:
    """Return each pair's angle per position, float32 [dim/2], and a factor on cos and sin.

    The kind `dynamic` uses the plain frequencies here. It differs only beyond the model's original
    context. The engine serves no positions beyond this context, because the frequencies would
    depend on the chunk sizes.
    """
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
    plain = 1.0 / rope.theta**exponents
    if rope.kind == "proportional":
        # The fast pairs rotate as in a fully rotated head; the others never rotate.
        rotates = torch.arange(dim // 2, device="cpu") < int(rope.share * dim // 2)
        return plain * rotates / rope.factor, 1.0
    if rope.kind == "linear":
        return plain / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, plain), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, plain, dim), _yarn_amplitude(rope)
    return plain, 1.0


def interleaved_axes(rope: Rope, dim: int) -> Tensor:
    """Return the axis (0 time, 1 row, 2 column) that rotates each pair, int64 [dim/2]."""
    axes = torch.zeros(dim // 2, dtype=torch.int64, device="cpu")
    for axis, num in enumerate(rope.mrope_section):
        if axis:
            axes[axis : 3 * num : 3] = axis
    return axes


def _llama3(rope: Rope, plain: Tensor) -> Tensor:
    """Slow down slow pairs, keep fast pairs and blend the pairs in between (Llama 3.1)."""
    # How many full rotations each pair makes within the original context.
    rotations = rope.original_positions * plain / (2 * math.pi)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    weight = ((rotations - low) / (high - low)).clamp(0, 1)
    return plain * (weight + (1 - weight) / rope.factor)


def _yarn(rope: Rope, plain: Tensor, dim: int) -> Tensor:
    """Scale as `_llama3` does, but blend by the pair's index (Peng et al., 2023, 3.2)."""

    def pair_with(rotations: float) -> float:
        """Return the fractional index of the pair that makes `rotations` full rotations.

        Rotations are counted within the original context.
        """
        ratio = rope.original_positions / (rotations * 2 * math.pi)
        return dim * math.log(ratio) / (2 * math.log(rope.theta))

    first, last = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    ramp = (torch.arange(dim // 2, device="cpu") - first) / max(last - first, 0.001)
    weight = 1 - ramp.clamp(0, 1)
    return plain * (weight + (1 - weight) / rope.factor)


def _yarn_amplitude(rope: Rope) -> float:
    def growth(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return growth(rope.mscale) / growth(rope.mscale_all_dim)
    return growth(1.0)
