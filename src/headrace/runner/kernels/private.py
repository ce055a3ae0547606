"""Owns every use of torch's private operators; nothing else may name one.

oneDNN multiplies faster by a matrix that was reordered for it once.
"""

import logging

import torch
import torch.nn.functional as F
from torch import Tensor

_log = logging.getLogger(__name__)


def has_fast_bf16() -> bool:
    """Whether this processor multiplies bfloat16 itself; otherwise it is widened first."""
    try:
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    except AttributeError:
        return False


def reorder(weight: Tensor) -> Tensor:
    """An opaque copy of weight [outputs, inputs] for `reordered_linear`."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)


def reordered_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def can_reorder() -> bool:
    """Tries the operators on a small product: they may be missing, or change without notice."""
    x, weight = torch.rand(3, 64).bfloat16(), torch.rand(96, 64).bfloat16()
    try:
        found = reordered_linear(x, reorder(weight), None)
        is_right = torch.allclose(found.float(), F.linear(x.float(), weight.float()), rtol=0.02)
    except (AttributeError, NotImplementedError, RuntimeError, TypeError):
        is_right = False
    if not is_right:
        _log.warning("oneDNN's reordered product does not work here; using the plain one.")
    return is_right
