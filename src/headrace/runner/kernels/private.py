"""Owns every use of torch's private operators; nothing else may name one.

oneDNN multiplies faster by a matrix that was reordered for it once. torch's flash attention tells
the sums by which parts of it are merged, which its public form does not.
"""

import logging
from functools import cache

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
    except (AttributeError, RuntimeError, TypeError):
        is_right = False
    if not is_right:
        _log.warning("oneDNN's reordered product does not work here; using the plain one.")
    return is_right


def attend_masked(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Softmax attention of q [heads, rows, dim] to keys and values [heads, keys, dim].

    mask: float32 [rows, keys], finite, added to the scores. Returns weighed values [heads, rows,
    dim] and the logarithms of the sums of weights, float32 [heads, rows].
    """
    if not _has_flash():
        return _attend_plainly(q, keys, values, mask)
    mask = None if mask is None else mask[None, None]
    weighed, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q[None], keys[None], values[None], attn_mask=mask
    )
    return weighed[0], sums[0]


def _attend_plainly(
    q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    scores = (q.float() @ keys.float().transpose(1, 2)) * q.shape[2] ** -0.5
    scores = scores if mask is None else scores + mask
    return (scores.softmax(-1) @ values.float()).to(q.dtype), scores.logsumexp(-1)


@cache
def _has_flash() -> bool:
    q, keys, mask = torch.rand(2, 3, 8), torch.rand(2, 5, 8), torch.rand(3, 5)
    try:
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q[None], keys[None], keys[None], attn_mask=mask[None, None]
        )
        pairs = zip(found, _attend_plainly(q, keys, keys, mask), strict=True)
        is_right = all(torch.allclose(left[0], right) for left, right in pairs)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        is_right = False
    if not is_right:
        _log.warning("torch's flash attention does not work here; using plain products.")
    return is_right
