"""Draws a token from a row of logits; every random number is Philox's, no state is kept.

Order: logits + bias, repetition, frequency and presence penalty, end tokens and what the grammar
forbids masked, then argmax if greedy, else temperature, top_k, top_p, min_p and one draw. Requests
with `samplers` are drawn by `chain` behind the mask; there the penalties are one of the samplers.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from headrace_common.plan import Drawn
from headrace_common.sampling import Logprobs, Sampling
from headrace_engine.runner.sampling.chain import draw_in_order
from headrace_engine.runner.sampling.logprobs import Floats, join, likeliest, pack_logprobs
from headrace_engine.runner.sampling.penalties import penalize
from headrace_engine.runner.sampling.philox import uniform
from headrace_engine.runner.sampling.state import SequenceState

_FIRST_HEAD = 256  # candidates that are put in order before it is known how many are needed


def draw(logits: Tensor, sequences: Sequence[SequenceState]) -> list[Drawn]:
    """One token for each sequence from its row of float32 logits [sequences, vocab]."""
    adjusted, faults = _adjusted(logits, sequences)
    best = adjusted.argmax(dim=-1)  # the first of equal ones, hence the lowest id
    peaks = adjusted.gather(1, best[:, None])[:, 0]
    is_sound = torch.isfinite(peaks.cpu()) & torch.isfinite(logits.amax(dim=-1).cpu())
    drawn = []
    for row, (known, token_id) in enumerate(zip(sequences, best.tolist(), strict=True)):
        if row in faults:
            drawn.append(Drawn(error=faults[row]))
            continue
        if not is_sound[row]:
            drawn.append(Drawn(error="The model's output is not a number."))
            continue
        if not known.sampling.is_greedy:
            token_id = _dice(adjusted[row], known)
        drawn.append(Drawn((token_id,), _logprobs(logits[row : row + 1], token_id, known)))
    return drawn


def draw_guessed(
    logits: Tensor, known: SequenceState, drawn: Drawn, guess: tuple[int, ...]
) -> Drawn:
    """Goes on after the draw from the first row, as long as tokens are the ones guessed.

    The next row was computed behind the guess, so it is the sequence's own if that was right.
    """
    for row, token_id in enumerate(guess, 1):
        if drawn.error is not None or drawn.token_ids[-1] != token_id or known.is_over:
            break
        (more,) = draw(logits[row : row + 1], [known])
        known.token_ids.extend(more.token_ids)
        logprobs = drawn.logprobs
        if logprobs is not None and more.logprobs is not None:
            logprobs = join((logprobs, more.logprobs))
        drawn = Drawn(drawn.token_ids + more.token_ids, logprobs, more.error)
    return drawn


def sample(logits: Floats, sampling: Sampling, dice: float) -> int:
    """The candidate that `dice`, a number of [0, 1), points at."""
    with np.errstate(over="ignore"):  # far below the best one is as good as infinitely far
        weights = np.exp((logits - logits.max()) / np.float32(sampling.temperature))
    limit = min(sampling.top_k or len(logits), len(logits))
    size = limit if limit < len(logits) else min(_FIRST_HEAD, limit)
    is_cut = sampling.top_p < 1 or sampling.min_p > 0
    while True:
        ids = likeliest(logits, size)
        mass = np.cumsum(weights[ids], dtype=np.float64)
        total = float(mass[-1] if size == limit else weights.sum(dtype=np.float64))
        num = _num_candidates(weights[ids], mass, total, sampling)
        if num < size or size == limit:
            total = float(mass[num - 1])
            break
        if not is_cut and mass[-1] > dice * total:
            break
        size = min(16 * size, limit)  # the head was too short to tell
    place = int(np.searchsorted(mass[:num], dice * total, side="right"))
    return int(ids[min(place, num - 1)])


def _num_candidates(weights: Floats, mass: np.ndarray, total: float, sampling: Sampling) -> int:
    """How many of the ordered candidates top_p and min_p leave; their length if all, so far."""
    num = int(np.count_nonzero(weights))
    if sampling.top_p < 1:
        num = min(num, int(np.searchsorted(mass, sampling.top_p * total)) + 1)
    if sampling.min_p > 0:
        num = min(num, int(np.count_nonzero(weights >= sampling.min_p * weights[0])))
    return num


def _dice(row: Tensor, known: SequenceState) -> int:
    dice = uniform(known.sampling.seed, known.num_generated, known.choice)
    if known.sampling.samplers:
        return draw_in_order(row.cpu().numpy(), known, dice)
    return sample(row.cpu().numpy(), known.sampling, dice)


def _logprobs(logits: Tensor, token_id: int, known: SequenceState) -> Logprobs | None:
    count = known.sampling.num_logprobs
    return None if count is None else pack_logprobs(logits, (token_id,), count)


def _adjusted(logits: Tensor, sequences: Sequence[SequenceState]) -> tuple[Tensor, dict[int, str]]:
    """The same tensor if no sequence changes anything, else a copy on the host; faults by row."""
    changing = [row for row, known in enumerate(sequences) if _changes(known)]
    faults: dict[int, str] = {}
    if not changing:
        return logits, faults
    copy = logits.to("cpu", copy=True)
    for row in changing:
        try:
            _adjust(copy[row].numpy(), sequences[row])
        except ValueError as error:
            faults[row] = f"The answer's grammar allows no further token: it {error}."
    return copy, faults


def _changes(known: SequenceState) -> bool:
    s = known.sampling
    if s.logit_bias or known.is_penalized or known.constraint is not None:
        return True
    return s.masks_ends(len(known.token_ids) - known.num_prompt)


def _reasons(row: Floats, known: SequenceState) -> bool:
    """Whether the model begins with reasoning of itself, not for want of an allowed token."""
    tags = known.sampling.grammar_tags
    assert tags is not None
    return known.num_generated == 0 and int(row.argmax()) == tags[0]


def _adjust(row: Floats, known: SequenceState) -> None:
    s = known.sampling
    reasons = s.grammar_tags is not None and _reasons(row, known)
    for token_id, bias in s.logit_bias.items():
        row[token_id] += np.float32(bias)
    if known.is_penalized:
        penalize(row, known)
    if known.constraint is not None:
        allowed = known.constraint.allowed(known.token_ids[known.num_prompt :])
        if reasons and s.grammar_tags:
            allowed[s.grammar_tags[0]] = True
        row[~allowed] = -np.inf
    elif s.masks_ends(len(known.token_ids) - known.num_prompt):
        row[list(s.end_token_ids)] = -np.inf
