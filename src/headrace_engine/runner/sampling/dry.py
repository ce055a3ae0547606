"""DRY (don't repeat yourself): lowers the logits of tokens that would continue a repetition.

The definition is from llama.cpp, after p-e-w's proposal for text-generation-webui. If the last n
tokens have occurred before, the token after the earlier occurrence is penalized. The token's
logit is lowered by multiplier · base^(n - allowed_length). A sequence breaker ends a repetition.
"""

import math

import numpy as np

from headrace_engine.runner.sampling.candidates import Candidates
from headrace_engine.runner.sampling.repeats import Ints, Repeats
from headrace_engine.runner.sampling.state import SequenceState

# The logarithm of the largest float32. llama.cpp limits the power to the largest float32.
_LOG_LARGEST = 88.7228391


def penalize_repeats(remaining: Candidates, sequence: SequenceState) -> Candidates:
    """Return the candidates sorted by rising id, with lower logits for repeating tokens."""
    s = sequence.sampling
    if not s.dry_multiplier or not s.dry_penalty_last_n:
        return remaining
    repeats = sequence.repetitions()
    longest = _longest_by_token(repeats, s.dry_penalty_last_n, s.dry_allowed_length)
    remaining = remaining.at(np.argsort(remaining.ids))
    if not len(longest):
        return remaining
    lengths = np.full(len(remaining.ids), -1)
    is_within = remaining.ids < len(longest)
    lengths[is_within] = longest[remaining.ids[is_within]]
    exponents = lengths - s.dry_allowed_length
    if s.dry_base > 1.000001:
        exponents = np.minimum(exponents, int(_LOG_LARGEST / math.log(s.dry_base)))
    penalties = s.dry_multiplier * np.power(s.dry_base, exponents)
    return remaining._replace(logits=remaining.logits - np.where(lengths >= 0, penalties, 0))


def _longest_by_token(repeats: Repeats, last_n: int, least: int) -> Ints:
    """Return, by token id, the length of the longest repetition that the token would continue.

    Only repetitions of at least `least` tokens count. The length is -1 for a token that continues
    no repetition. The array is empty if there are no repetitions.
    """
    tokens, num = repeats.tokens, len(repeats.tokens)
    size = num if last_n < 0 else min(num, last_n)
    first = num - size
    # No repetition extends back past the last breaker or beyond the window.
    most = num - repeats.break_end if repeats.break_at >= first else size
    if size <= least or most < least:
        return np.empty(0, np.int64)
    lengths = np.minimum(repeats.lengths[first:], np.arange(1, size))
    lengths = np.minimum(lengths, most)
    is_long = lengths >= least
    if not is_long.any():
        return np.empty(0, np.int64)
    followers = tokens[first + 1 :][is_long]
    longest = np.full(1 + int(followers.max()), -1)
    np.maximum.at(longest, followers, lengths[is_long])
    whole = repeats.breakers.whole
    longest[whole[whole < len(longest)]] = -1
    return longest
