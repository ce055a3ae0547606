"""The one order of candidates: falling value, equal values by rising id."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


def likeliest(values: Floats, count: int) -> NDArray[np.intp]:
    """Ids of the `count` largest values in order; all of them if there are fewer."""
    ids = np.arange(len(values))
    if count < len(values):
        threshold = np.partition(values, len(values) - count)[len(values) - count]
        ids = np.flatnonzero(values >= threshold)  # may be more: ties
    return ids[np.argsort(-values[ids], kind="stable")][:count]
