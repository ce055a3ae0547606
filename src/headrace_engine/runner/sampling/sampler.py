"""Draws a token from a row of logits; every random number comes from Philox.

The logits are changed in this order: logit bias; repetition, frequency and presence penalties;
masking of end tokens and of tokens that the grammar forbids. Greedy requests use the argmax. For
other requests, temperature, top_k, top_p and min_p apply, and one token is drawn. For requests
with `samplers`, module `chain` draws after the mask, and the penalties are one of the samplers.
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

# The number of candidates that are sorted at first. Usually this number is enough.
_FIRST_SIZE = 256


def draw(logits: Tensor, sequences: Sequence[SequenceState]) -> list[Drawn]:
    """Draw one token per sequence from the sequence's row of float32 logits [sequences, vocab]."""
    adjusted, faults = _adjusted(logits, sequences)
    # argmax returns the lowest id among equal logits.
    best = adjusted.argmax(dim=-1)
    peaks = adjusted.gather(1, best[:, None])[:, 0]
    is_sound = torch.isfinite(peaks.cpu()) & torch.isfinite(logits.amax(dim=-1).cpu())
    drawn = []
    for row, (sequence, token_id) in enumerate(zip(sequences, best.tolist(), strict=True)):
        if row in faults:
            drawn.append(Drawn(error=faults[row]))
            continue
        if not is_sound[row]:
            drawn.append(Drawn(error="The model's output contains NaN or infinity."))
            continue
        if not sequence.sampling.is_greedy:
            token_id = _draw_one(adjusted[row], sequence)
        logprobs = _logprobs(logits[row : row + 1], token_id, sequence)
        state = sequence.state if sequence.remembered else b""
        drawn.append(Drawn((token_id,), logprobs, state=state))
    return drawn


def draw_guessed(
    logits: Tensor, sequence: SequenceState, drawn: Drawn, guess: tuple[int, ...]
) -> Drawn:
    """Continue after the draw from the first row, as long as drawn tokens equal the guess.

    Each later row follows one more guessed token. So a row is valid for this sequence
    if all tokens drawn from earlier rows equal the guess.
    """
    for row, token_id in enumerate(guess, 1):
        if drawn.error is not None or drawn.token_ids[-1] != token_id or sequence.is_over:
            break
        (more,) = draw(logits[row : row + 1], [sequence])
        sequence.token_ids.extend(more.token_ids)
        logprobs = drawn.logprobs
        if logprobs is not None and more.logprobs is not None:
            logprobs = join((logprobs, more.logprobs))
        drawn = Drawn(drawn.token_ids + more.token_ids, logprobs, more.error, state=more.state)
    return drawn


def sample(logits: Floats, sampling: Sampling, dice: float) -> int:
    """Return the candidate that `dice`, a number in [0, 1), selects.

    Sorting a whole vocabulary for each token is slow, and the few likeliest tokens nearly always
    decide the draw. So only the `size` likeliest tokens are sorted at first. The sorted tokens
    are enough if top_p or min_p keeps only some of the sorted tokens. Without top_p and min_p,
    the sorted tokens are enough if their total probability exceeds `dice`. Otherwise `size` grows
    16-fold.
    """
    # With a tiny temperature, the quotient can overflow to minus infinity, which is correct.
    with np.errstate(over="ignore"):
        weights = np.exp((logits - logits.max()) / np.float32(sampling.temperature))
    limit = min(sampling.top_k or len(logits), len(logits))
    size = limit if limit < len(logits) else min(_FIRST_SIZE, limit)
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
        # Too few candidates were sorted to decide.
        size = min(16 * size, limit)
    index = int(np.searchsorted(mass[:num], dice * total, side="right"))
    return int(ids[min(index, num - 1)])


def _num_candidates(weights: Floats, mass: np.ndarray, total: float, sampling: Sampling) -> int:
    """Return how many of the sorted candidates top_p and min_p keep, possibly all."""
    num = int(np.count_nonzero(weights))
    if sampling.top_p < 1:
        num = min(num, int(np.searchsorted(mass, sampling.top_p * total)) + 1)
    if sampling.min_p > 0:
        num = min(num, int(np.count_nonzero(weights >= sampling.min_p * weights[0])))
    return num


def _draw_one(row: Tensor, sequence: SequenceState) -> int:
    dice = uniform(sequence.sampling.seed, sequence.num_generated, sequence.choice)
    if sequence.sampling.samplers:
        return draw_in_order(row.cpu().numpy(), sequence, dice)
    return sample(row.cpu().numpy(), sequence.sampling, dice)


def _logprobs(logits: Tensor, token_id: int, sequence: SequenceState) -> Logprobs | None:
    count = sequence.sampling.num_logprobs
    return None if count is None else pack_logprobs(logits, (token_id,), count)


def _adjusted(logits: Tensor, sequences: Sequence[SequenceState]) -> tuple[Tensor, dict[int, str]]:
    """Return adjusted logits, and a fault for each row whose grammar fails.

    Returns `logits` itself if nothing changes.
    """
    changing = [row for row, sequence in enumerate(sequences) if _changes(sequence)]
    faults: dict[int, str] = {}
    if not changing:
        return logits, faults
    copy = logits.to("cpu", copy=True)
    for row in changing:
        try:
            _adjust(copy[row].numpy(), sequences[row])
        except ValueError as error:
            faults[row] = f"The answer's grammar does not allow any further token: it {error}."
    return copy, faults


def _changes(sequence: SequenceState) -> bool:
    s = sequence.sampling
    if s.logit_bias or sequence.is_penalized or sequence.constraint is not None:
        return True
    return s.masks_ends(len(sequence.token_ids) - sequence.num_prompt)


def _starts_reasoning(row: Floats, sequence: SequenceState) -> bool:
    """Return whether the likeliest first token starts reasoning, before any token is forbidden."""
    tags = sequence.sampling.grammar_tags
    assert tags is not None
    return sequence.num_generated == 0 and int(row.argmax()) == tags[0]


def _adjust(row: Floats, sequence: SequenceState) -> None:
    s = sequence.sampling
    starts_reasoning = s.grammar_tags is not None and _starts_reasoning(row, sequence)
    # A vocabulary can have tokens without a logit, for example placeholders of images.
    for token_id, bias in s.logit_bias.items():
        if token_id < len(row):
            row[token_id] += np.float32(bias)
    if sequence.is_penalized:
        penalize(row, sequence)
    if sequence.constraint is not None:
        allowed = sequence.constraint.allowed(sequence.token_ids[sequence.num_prompt :])
        if starts_reasoning and s.grammar_tags:
            allowed[s.grammar_tags[0]] = True
        row[~allowed] = -np.inf
    elif s.masks_ends(len(sequence.token_ids) - sequence.num_prompt):
        row[[token_id for token_id in s.end_token_ids if token_id < len(row)]] = -np.inf
