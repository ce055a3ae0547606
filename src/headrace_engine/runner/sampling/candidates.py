"""Holds the candidates from which the next token is drawn."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace_engine.runner.sampling.logprobs import Doubles


class Candidates(NamedTuple):
    """Token ids with finite logits; candidates with equal logits are ordered by rising id."""

    ids: NDArray[np.int64]
    logits: Doubles
    # The number of logits in the row that the candidates were taken from.
    vocab_size: int

    def at(self, indices: NDArray[np.intp] | slice) -> "Candidates":
        return self._replace(ids=self.ids[indices], logits=self.logits[indices])

    def sorted(self) -> "Candidates":
        """Return the candidates with the likeliest candidate first."""
        return self.at(np.argsort(-self.logits, kind="stable"))

    def likeliest(self, count: int) -> "Candidates":
        if count >= len(self.ids):
            return self
        threshold = -np.partition(-self.logits, count - 1)[count - 1]
        return self.at(np.flatnonzero(self.logits >= threshold)).sorted().at(slice(count))

    def probabilities(self) -> Doubles:
        weights = np.exp(self.logits - self.logits.max())
        return weights / weights.sum()
