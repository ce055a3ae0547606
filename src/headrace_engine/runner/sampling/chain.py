"""Runs llama.cpp's samplers in an order that the request chooses.

A sampler takes the candidates and returns the remaining candidates, possibly with other logits. A
sampler that learns from the draw has a second function in `LEARNERS`, which updates the
sequence's memory.

The sampler `typ_p` is from Meister et al., Locally typical sampling (2023). The sampler
`top_n_sigma` is from Tang et al., Top-nσ: not all logits are you need (2024). The sampler `xtc`
(exclude top choices) and the dynamic temperature are defined as in llama.cpp. Numbers are
float64, so no setting overflows.
"""

from collections.abc import Callable, Mapping

import numpy as np

from headrace_common.sampling import GREEDY_BELOW, Sampling
from headrace_engine.runner.sampling import mirostat
from headrace_engine.runner.sampling.candidates import Candidates
from headrace_engine.runner.sampling.dry import penalize_repeats
from headrace_engine.runner.sampling.logprobs import Doubles, Floats
from headrace_engine.runner.sampling.penalties import penalize
from headrace_engine.runner.sampling.philox import uniform
from headrace_engine.runner.sampling.state import SequenceState

_HUGE = 1e30


def draw_in_order(row: Floats, sequence: SequenceState, dice: float) -> int:
    """Apply the samplers of the request; return the remaining token that `dice` selects.

    `dice` is a number in [0, 1).
    """
    remaining = candidates(row, sequence).sorted()
    p = remaining.probabilities()
    mass, last = np.cumsum(p), int(np.count_nonzero(p)) - 1
    index = min(int(np.searchsorted(mass, dice * mass[-1], side="right")), last)
    for name in sequence.sampling.samplers:
        if name in LEARNERS:
            LEARNERS[name](sequence, float(p[index]))
    return int(remaining.ids[index])


def candidates(row: Floats, sequence: SequenceState) -> Candidates:
    """Return the candidates in a row that remain after the request's samplers.

    At least one logit of the row must be finite.
    """
    ids = np.flatnonzero(np.isfinite(row))
    remaining = Candidates(ids, row[ids].astype(np.float64), len(row))
    for name in sequence.sampling.samplers:
        remaining = SAMPLERS[name](remaining, sequence)
    return remaining


def _penalties(remaining: Candidates, sequence: SequenceState) -> Candidates:
    size = 1 + max(int(remaining.ids.max()), max(sequence.token_ids, default=0))
    row = np.zeros(size, np.float32)
    row[remaining.ids] = _within_float32(remaining.logits)
    penalize(row, sequence)
    ids = np.sort(remaining.ids)
    return remaining._replace(ids=ids, logits=_within_float32(row[ids]))


def _within_float32(values: Floats | Doubles) -> Doubles:
    largest = float(np.finfo(np.float32).max)
    return np.clip(values.astype(np.float64), -largest, largest)


def _top_n_sigma(remaining: Candidates, sequence: SequenceState) -> Candidates:
    """Keep logits within n standard deviations of the largest logit."""
    n = sequence.sampling.top_n_sigma
    if n <= 0:
        return remaining
    threshold = remaining.logits.max() - n * remaining.logits.std()
    return remaining.at(np.flatnonzero(remaining.logits >= threshold))


def _top_k(remaining: Candidates, sequence: SequenceState) -> Candidates:
    return remaining.likeliest(sequence.sampling.top_k or len(remaining.ids))


def _top_p(remaining: Candidates, sequence: SequenceState) -> Candidates:
    s = sequence.sampling
    if s.top_p >= 1:
        return remaining
    remaining = remaining.sorted()
    mass = np.cumsum(remaining.probabilities())
    return remaining.at(slice(max(1 + int(np.searchsorted(mass, s.top_p * mass[-1])), s.min_keep)))


def _min_p(remaining: Candidates, sequence: SequenceState) -> Candidates:
    s = sequence.sampling
    if s.min_p <= 0:
        return remaining
    # Logarithms are compared, because probabilities of the unlikeliest tokens can round to 0.
    kept = np.flatnonzero(remaining.logits >= remaining.logits.max() + np.log(s.min_p))
    fewest = max(1, s.min_keep)
    return remaining.at(kept) if len(kept) >= fewest else remaining.likeliest(fewest)


def _typical(remaining: Candidates, sequence: SequenceState) -> Candidates:
    """Keep tokens whose surprise is near the entropy, with a total probability of typical_p."""
    s = sequence.sampling
    if s.typical_p >= 1:
        return remaining
    remaining = remaining.sorted()
    p = remaining.probabilities()
    surprise = -np.log(np.maximum(p, np.finfo(np.float64).tiny))
    order = np.argsort(np.abs(surprise - p @ surprise), kind="stable")
    count = 1 + int(np.searchsorted(np.cumsum(p[order]), s.typical_p, side="right"))
    return remaining.at(np.sort(order[: max(count, s.min_keep)]))


def _xtc(remaining: Candidates, sequence: SequenceState) -> Candidates:
    """Exclude the top choices in a random part of the draws.

    A draw is selected with probability xtc_probability. In a selected draw, all tokens at or
    above the threshold are removed, except the least likely of these tokens.
    """
    s = sequence.sampling
    if s.xtc_probability <= 0 or s.xtc_threshold > 0.5:
        return remaining
    if uniform(s.seed, sequence.num_generated, sequence.choice, stream=1) >= s.xtc_probability:
        return remaining
    remaining = remaining.sorted()
    num_above = int(np.count_nonzero(remaining.probabilities() >= s.xtc_threshold))
    num_left = len(remaining.ids) - max(0, num_above - 1)
    return remaining if num_left < s.min_keep else remaining.at(slice(-num_left, None))


def _temperature(remaining: Candidates, sequence: SequenceState) -> Candidates:
    temperature = _dynamic(remaining, sequence.sampling)
    if temperature < GREEDY_BELOW:
        return remaining.likeliest(1)
    return remaining._replace(logits=remaining.logits / temperature)


def _dynamic(remaining: Candidates, sampling: Sampling) -> float:
    """Return the temperature. A temperature with a range rises with the candidates' entropy."""
    if sampling.dynatemp_range <= 0:
        return sampling.temperature
    if len(remaining.ids) == 1:
        return 1.0
    p = remaining.probabilities()
    surprise = -np.log(np.maximum(p, np.finfo(np.float64).tiny))
    entropy = np.abs(p @ surprise) / np.log(len(p))
    low = max(0.0, sampling.temperature - sampling.dynatemp_range)
    high = sampling.temperature + sampling.dynatemp_range
    # Extreme exponents can overflow.
    with np.errstate(over="ignore", divide="ignore"):
        fraction = min(float(entropy**sampling.dynatemp_exponent), _HUGE)
    return low + (high - low) * fraction


SAMPLERS: Mapping[str, Callable[[Candidates, SequenceState], Candidates]] = {
    "penalties": _penalties,
    "dry": penalize_repeats,
    "top_n_sigma": _top_n_sigma,
    "top_k": _top_k,
    "typ_p": _typical,
    "top_p": _top_p,
    "min_p": _min_p,
    "xtc": _xtc,
    "temperature": _temperature,
    "mirostat": mirostat.truncate,
}

LEARNERS: Mapping[str, Callable[[SequenceState, float], None]] = {"mirostat": mirostat.learn}
"""Functions called after the draw, with the drawn token's probability among the candidates."""
