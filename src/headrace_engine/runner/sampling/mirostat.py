"""Mirostat: keeps the surprise of the drawn tokens near a target by removing candidates.

Basu, Ramachandran, Keskar, Varshney: Mirostat: a neural text decoding algorithm that directly
controls perplexity (2021), in the two versions that llama.cpp has. A sequence remembers mu, the
largest surprise that is allowed, in bits.
"""

import math

import numpy as np

from headrace_engine.runner.sampling.candidates import Candidates
from headrace_engine.runner.sampling.logprobs import Doubles
from headrace_engine.runner.sampling.state import SequenceState

# Version 1 estimates the distribution from this number of likeliest tokens.
_NUM_ESTIMATED = 100


def truncate(remaining: Candidates, sequence: SequenceState) -> Candidates:
    """Return the candidates that mu allows, the likeliest first; at least one candidate remains."""
    remaining, mu = remaining.sorted(), _mu(sequence)
    if sequence.sampling.mirostat == 1:
        return remaining.at(slice(_num_by_zipf(remaining.logits, mu, remaining.vocab_size)))
    surprise = -np.log2(np.maximum(remaining.probabilities(), np.finfo(np.float64).tiny))
    return remaining.at(slice(max(1, int(np.count_nonzero(surprise <= mu)))))


def learn(sequence: SequenceState, probability: float) -> None:
    """Lower mu if the drawn token was more surprising than the target, else raise it."""
    s = sequence.sampling
    error = -math.log2(probability) - s.mirostat_tau
    sequence.remembered["mu"] = _mu(sequence) - s.mirostat_eta * error


def _mu(sequence: SequenceState) -> float:
    return sequence.remembered.get("mu", 2 * sequence.sampling.mirostat_tau)


def _num_by_zipf(logits: Doubles, mu: float, vocab_size: int) -> int:
    """Return how many of the sorted candidates have a surprise of at most mu.

    The formula assumes that probabilities follow Zipf's law, with an exponent s that is estimated
    from the likeliest tokens:

        k = (e · 2^mu / (1 - n^-e))^(1/s)

    where e = s - 1, and n is the size of the vocabulary. The result is computed as a logarithm,
    so that no value of mu or s causes an overflow.
    """
    ranks = np.arange(1, min(_NUM_ESTIMATED, len(logits)))
    steps = np.log((ranks + 1) / ranks)
    falls = -np.diff(logits[: len(ranks) + 1])
    s = float(steps @ falls / (steps @ steps)) if len(ranks) else math.inf
    if math.isinf(s):
        return 1
    excess, log_n = s - 1, math.log(vocab_size)
    ratio = excess / -math.expm1(-excess * log_n) if excess else 1 / log_n
    log_k = mu * math.log(2) + math.log(ratio)
    # This comparison also covers s = 0, with which all tokens are equally likely.
    if log_k >= s * math.log(len(logits)):
        return len(logits)
    return max(1, int(math.exp(log_k / s))) if s else 1
