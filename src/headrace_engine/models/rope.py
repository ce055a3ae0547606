"""Frequencies of rotary positions, plain or stretched; never touches a model or a device."""

import math

import torch
from torch import Tensor

from headrace_engine.models.text_config import Rope


def frequencies(rope: Rope, dim: int) -> tuple[Tensor, float]:
    """Angle per position of each pair, float32 [dim/2], and the factor on cosine and sine.

    `dynamic` changes nothing within the positions that the model was made for, and no others are
    served: past them its frequencies would depend on how a prompt was cut.
    """
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
    plain = 1.0 / rope.theta**exponents
    if rope.kind == "linear":
        return plain / rope.factor, 1.0
    if rope.kind == "llama3":
        return _llama3(rope, plain), 1.0
    if rope.kind == "yarn":
        return _yarn(rope, plain, dim), _yarn_amplitude(rope)
    return plain, 1.0


def interleaved_axes(rope: Rope, dim: int) -> Tensor:
    """The axis (time, row, column) that rotates each pair, int64 [dim/2]; axes alternate."""
    axes = torch.zeros(dim // 2, dtype=torch.int64, device="cpu")
    for axis, num in enumerate(rope.mrope_section):
        if axis:
            axes[axis : 3 * num : 3] = axis
    return axes


def _llama3(rope: Rope, plain: Tensor) -> Tensor:
    """Slow pairs are slowed by the factor, fast ones kept, those between blended (Llama 3.1)."""
    turns = rope.original_positions * plain / (2 * math.pi)  # within the original context
    low, high = rope.low_freq_factor, rope.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return plain * (kept + (1 - kept) / rope.factor)


def _yarn(rope: Rope, plain: Tensor, dim: int) -> Tensor:
    """The same as above with a ramp over the pair's number (Peng et al., 2023, section 3.2)."""

    def pair_with(turns: float) -> float:
        """The pair, counted in halves of dim, that turns so often in the original context."""
        ratio = rope.original_positions / (turns * 2 * math.pi)
        return dim * math.log(ratio) / (2 * math.log(rope.theta))

    first, last = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    ramp = (torch.arange(dim // 2, device="cpu") - first) / max(last - first, 0.001)
    kept = 1 - ramp.clamp(0, 1)
    return plain * (kept + (1 - kept) / rope.factor)


def _yarn_amplitude(rope: Rope) -> float:
    def growth(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return growth(rope.mscale) / growth(rope.mscale_all_dim)
    return growth(1.0)
