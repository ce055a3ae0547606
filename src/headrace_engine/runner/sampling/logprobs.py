"""Computes log probabilities of the model's own distribution, and orders candidates."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace_common.sampling import Logprobs

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
# The smallest log probability that is returned, because JSON has no minus infinity.
_FLOOR = -9999.0


def likeliest(values: Floats, count: int) -> NDArray[np.intp]:
    """Return the ids of the `count` largest values, or all ids if there are fewer values.

    The largest value is first; equal values are ordered by rising id.
    """
    ids = np.arange(len(values))
    if count < len(values):
        threshold = np.partition(values, len(values) - count)[len(values) - count]
        # If several values equal the threshold, there may be more than `count` ids.
        ids = np.flatnonzero(values >= threshold)
    return ids[np.argsort(-values[ids], kind="stable")][:count]


def pack_logprobs(logits: Tensor, token_ids: Sequence[int], num_likeliest: int) -> Logprobs:
    """Pack the log probabilities of each row's token and of the row's likeliest tokens."""
    values = torch.log_softmax(logits.float(), dim=-1).cpu().numpy()
    count = min(num_likeliest, values.shape[1])
    ids = np.empty((len(values), 1 + count), dtype=np.int32)
    ids[:, 0] = token_ids
    for row, target in zip(values, ids, strict=True):
        if count:
            target[1:] = likeliest(row, count)
    picked = np.take_along_axis(values, ids.astype(np.int64), axis=1)
    return Logprobs(1 + count, ids.tobytes(), np.maximum(picked, _FLOOR).tobytes())


def join(parts: Sequence[Logprobs]) -> Logprobs:
    """Concatenate the rows of one or more parts, which must have the same width."""
    return Logprobs(
        parts[0].width, b"".join(p.ids for p in parts), b"".join(p.values for p in parts)
    )
