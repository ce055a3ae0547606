"""Counts how often each token has occurred in a growing sequence."""

from array import array

import numpy as np
from numpy.typing import NDArray


class Occurrences:
    """Holds the distinct tokens from index `start` on, in rising order, and their counts.

    Each update counts only new tokens, so a draw after 100,000 tokens counts one token.
    """

    def __init__(self, start: int = 0) -> None:
        self.token_ids: NDArray[np.int64] = np.empty(0, np.int64)
        self.counts: NDArray[np.int64] = np.empty(0, np.int64)
        self.num_counted = start

    def update(self, token_ids: "array[int]") -> None:
        """Count the tokens since the last call; `token_ids` is the whole sequence."""
        if len(token_ids) == self.num_counted:
            return
        new, counts = np.unique(np.array(token_ids[self.num_counted :]), return_counts=True)
        self.num_counted = len(token_ids)
        indices = np.searchsorted(self.token_ids, new)
        is_known = np.searchsorted(self.token_ids, new, side="right") > indices
        self.counts[indices[is_known]] += counts[is_known]
        first = indices[~is_known], new[~is_known], counts[~is_known]
        self.token_ids = np.insert(self.token_ids, first[0], first[1])
        self.counts = np.insert(self.counts, first[0], first[2])
