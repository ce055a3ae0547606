"""Frequencies of rotary positions; never touches a model or a device."""

import torch
from torch import Tensor

from headrace.core.errors import ModelError
from headrace.models.text_config import Rope


def frequencies(rope: Rope, dim: int, max_positions: int) -> tuple[Tensor, float]:
    """Angle per position of each pair, float32 [dim/2], and the factor on cosine and sine."""
    if rope.kind != "default":
        raise ModelError(f"Rotary scaling {rope.kind} is not supported.")
    return _plain(rope.theta, dim), 1.0


def _plain(theta: float, dim: int) -> Tensor:
    exponents = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
    return 1.0 / theta**exponents
