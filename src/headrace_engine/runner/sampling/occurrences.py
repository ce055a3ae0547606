"""How often each token has occurred in a sequence that grows; each token is counted once."""

from array import array

import numpy as np
from numpy.typing import NDArray


class Occurrences:
    """Distinct tokens from number `start` on, rising, and how often each occurs.

    A sequence is taken in as far as it is new, so that a draw behind 100,000 tokens counts one.
    """

    def __init__(self, start: int = 0) -> None:
        self.token_ids: NDArray[np.int64] = np.empty(0, np.int64)
        self.counts: NDArray[np.int64] = np.empty(0, np.int64)
        self.num_taken = start

    def take(self, token_ids: "array[int]") -> None:
        """Counts the tokens since the last call; `token_ids` is the whole sequence."""
        if len(token_ids) == self.num_taken:
            return
        new, counts = np.unique(np.array(token_ids[self.num_taken :]), return_counts=True)
        self.num_taken = len(token_ids)
        places = np.searchsorted(self.token_ids, new)
        is_known = np.searchsorted(self.token_ids, new, side="right") > places
        self.counts[places[is_known]] += counts[is_known]
        first = places[~is_known], new[~is_known], counts[~is_known]
        self.token_ids = np.insert(self.token_ids, first[0], first[1])
        self.counts = np.insert(self.counts, first[0], first[2])
