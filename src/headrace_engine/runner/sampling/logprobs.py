"""Log probabilities of the model's own distribution, and the one order of candidates."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace_common.sampling import Logprobs

Floats = NDArray[np.float32]
_FLOOR = -9999.0  # JSON has no minus infinity


def likeliest(values: Floats, count: int) -> NDArray[np.intp]:
    """Ids of the `count` largest values: falling value, equal values by rising id.

    All of them if there are fewer.
    """
    ids = np.arange(len(values))
    if count < len(values):
        threshold = np.partition(values, len(values) - count)[len(values) - count]
        ids = np.flatnonzero(values >= threshold)  # may be more: ties
    return ids[np.argsort(-values[ids], kind="stable")][:count]


def pack_logprobs(logits: Tensor, token_ids: Sequence[int], num_likeliest: int) -> Logprobs:
    """One row per row of logits [rows, vocab]: its token, then the likeliest ones."""
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
    """Rows of all parts below each other; there is at least one part, and widths are equal."""
    return Logprobs(
        parts[0].width, b"".join(p.ids for p in parts), b"".join(p.values for p in parts)
    )
