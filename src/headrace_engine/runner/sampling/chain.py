"""llama.cpp's samplers in an order that the request chooses, each without state.

A sampler takes the candidates and returns those that it leaves, perhaps with other logits. Sources:
typical: Meister et al., Locally typical sampling (2023); top_n_sigma: Tang et al., Top-nσ: not all
logits are you need (2024); xtc (exclude top choices) and the dynamic temperature: as llama.cpp
defines them. Numbers are float64, so no setting overflows.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace_common.sampling import GREEDY_BELOW, Sampling
from headrace_engine.runner.sampling.logprobs import Floats
from headrace_engine.runner.sampling.penalties import penalize
from headrace_engine.runner.sampling.philox import uniform
from headrace_engine.runner.sampling.state import SequenceState

Doubles = NDArray[np.float64]
_HUGE = 1e30


class Candidates(NamedTuple):
    """Token ids and their finite logits; equal logits stand by rising id."""

    ids: NDArray[np.int64]
    logits: Doubles

    def at(self, places: NDArray[np.intp] | slice) -> "Candidates":
        return Candidates(self.ids[places], self.logits[places])

    def sorted(self) -> "Candidates":
        """Return the candidates with the likeliest first."""
        return self.at(np.argsort(-self.logits, kind="stable"))

    def likeliest(self, count: int) -> "Candidates":
        if count >= len(self.ids):
            return self
        threshold = -np.partition(-self.logits, count - 1)[count - 1]
        return self.at(np.flatnonzero(self.logits >= threshold)).sorted().at(slice(count))

    def probabilities(self) -> Doubles:
        weights = np.exp(self.logits - self.logits.max())
        return weights / weights.sum()


def draw_in_order(row: Floats, known: SequenceState, dice: float) -> int:
    """Return the token that `dice`, a number of [0, 1), selects among those that are left."""
    left = candidates(row, known).sorted()
    p = left.probabilities()
    mass, last = np.cumsum(p), int(np.count_nonzero(p)) - 1
    place = int(np.searchsorted(mass, dice * mass[-1], side="right"))
    return int(left.ids[min(place, last)])


def candidates(row: Floats, known: SequenceState) -> Candidates:
    """Return what the request's samplers leave of a row, which has at least one finite logit."""
    ids = np.flatnonzero(np.isfinite(row))
    left = Candidates(ids, row[ids].astype(np.float64))
    for name in known.sampling.samplers:
        left = SAMPLERS[name](left, known)
    return left


def _penalties(left: Candidates, known: SequenceState) -> Candidates:
    size = 1 + max(int(left.ids.max()), max(known.token_ids, default=0))
    row = np.zeros(size, np.float32)
    row[left.ids] = _within_float32(left.logits)
    penalize(row, known)
    ids = np.sort(left.ids)
    return Candidates(ids, _within_float32(row[ids]))


def _within_float32(values: Floats | Doubles) -> Doubles:
    largest = float(np.finfo(np.float32).max)
    return np.clip(values.astype(np.float64), -largest, largest)


def _top_n_sigma(left: Candidates, known: SequenceState) -> Candidates:
    """Keep logits within n standard deviations of the largest."""
    n = known.sampling.top_n_sigma
    if n <= 0:
        return left
    threshold = left.logits.max() - n * left.logits.std()
    return left.at(np.flatnonzero(left.logits >= threshold))


def _top_k(left: Candidates, known: SequenceState) -> Candidates:
    return left.likeliest(known.sampling.top_k or len(left.ids))


def _top_p(left: Candidates, known: SequenceState) -> Candidates:
    s = known.sampling
    if s.top_p >= 1:
        return left
    left = left.sorted()
    mass = np.cumsum(left.probabilities())
    return left.at(slice(max(1 + int(np.searchsorted(mass, s.top_p * mass[-1])), s.min_keep)))


def _min_p(left: Candidates, known: SequenceState) -> Candidates:
    s = known.sampling
    if s.min_p <= 0:
        return left
    # Compared as logarithms: probabilities of the unlikeliest tokens may round to 0.
    kept = np.flatnonzero(left.logits >= left.logits.max() + np.log(s.min_p))
    return left.at(kept) if len(kept) >= max(1, s.min_keep) else left.likeliest(max(1, s.min_keep))


def _typical(left: Candidates, known: SequenceState) -> Candidates:
    """Keep tokens whose surprise is nearest to the expected one, until they hold typical_p."""
    s = known.sampling
    if s.typical_p >= 1:
        return left
    left = left.sorted()
    p = left.probabilities()
    surprise = -np.log(np.maximum(p, np.finfo(np.float64).tiny))
    order = np.argsort(np.abs(surprise - p @ surprise), kind="stable")
    count = 1 + int(np.searchsorted(np.cumsum(p[order]), s.typical_p, side="right"))
    return left.at(np.sort(order[: max(count, s.min_keep)]))


def _xtc(left: Candidates, known: SequenceState) -> Candidates:
    """Remove, with a probability, the tokens at or above the threshold but the least likely."""
    s = known.sampling
    if s.xtc_probability <= 0 or s.xtc_threshold > 0.5:
        return left
    if uniform(s.seed, known.num_generated, known.choice, stream=1) >= s.xtc_probability:
        return left
    left = left.sorted()
    num_above = int(np.count_nonzero(left.probabilities() >= s.xtc_threshold))
    num_left = len(left.ids) - max(0, num_above - 1)
    return left if num_left < s.min_keep else left.at(slice(-num_left, None))


def _temperature(left: Candidates, known: SequenceState) -> Candidates:
    temperature = _dynamic(left, known.sampling)
    if temperature < GREEDY_BELOW:
        return left.likeliest(1)
    return Candidates(left.ids, left.logits / temperature)


def _dynamic(left: Candidates, sampling: Sampling) -> float:
    """Return the temperature, which rises with the entropy of the candidates if it has a range."""
    if sampling.dynatemp_range <= 0:
        return sampling.temperature
    if len(left.ids) == 1:
        return 1.0
    p = left.probabilities()
    surprise = -np.log(np.maximum(p, np.finfo(np.float64).tiny))
    entropy = np.abs(p @ surprise) / np.log(len(p))
    low = max(0.0, sampling.temperature - sampling.dynatemp_range)
    high = sampling.temperature + sampling.dynatemp_range
    with np.errstate(over="ignore", divide="ignore"):  # by extreme exponents
        share = min(float(entropy**sampling.dynatemp_exponent), _HUGE)
    return low + (high - low) * share


SAMPLERS: Mapping[str, Callable[[Candidates, SequenceState], Candidates]] = {
    "penalties": _penalties,
    "top_n_sigma": _top_n_sigma,
    "top_k": _top_k,
    "typ_p": _typical,
    "top_p": _top_p,
    "min_p": _min_p,
    "xtc": _xtc,
    "temperature": _temperature,
}
