"""Draws a token from a row of logits; every random number is Philox's, no state is kept.

Order: logits + bias, repetition, frequency and presence penalty, end tokens and what the grammar
forbids masked, then argmax if greedy, else temperature, top_k, top_p, min_p and one draw.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace.core.plan import Begin, Drawn
from headrace.core.sampling import Logprobs, Sampling
from headrace.runner.pooling import UNIT, PooledRows, VectorHead
from headrace.runner.sampling.logprobs import Floats, join, likeliest, pack_logprobs
from headrace.runner.sampling.occurrences import Occurrences
from headrace.runner.sampling.philox import uniform

_FIRST_HEAD = 256  # candidates that are put in order before it is known how many are needed


class Constraint(Protocol):
    """The state of one answer in its grammar."""

    def allowed(self, answer: "array[int]") -> NDArray[np.bool_]:
        """The tokens that may follow these, by id; ValueError if the grammar gave up."""
        ...

    def forced(self, answer: "array[int]") -> tuple[int, ...]:
        """Some tokens that spell what must follow these; none if there is a choice."""
        ...


@dataclass(slots=True)
class SequenceState:
    """Tokens known so far, the drawn ones appended, and how to draw the next."""

    token_ids: "array[int]"
    num_prompt: int
    choice: int
    sampling: Sampling
    constraint: Constraint | None = None
    pooled: PooledRows | None = None  # of one that draws nothing
    seen: Occurrences = field(default_factory=Occurrences)  # of all tokens, if it is penalized
    drawn: Occurrences = field(init=False)  # of those drawn

    def __post_init__(self) -> None:
        self.drawn = Occurrences(self.num_prompt)

    @classmethod
    def from_begin(
        cls, begin: Begin, constraint: Constraint | None = None, head: VectorHead = UNIT
    ) -> "SequenceState":
        # A copy of our own: it grows with each draw.
        token_ids = begin.token_ids[:]
        known = cls(token_ids, begin.num_prompt, begin.choice, begin.sampling, constraint)
        if begin.sampling.pooling is not None:
            known.pooled = PooledRows(begin.sampling.pooling, head)
        return known

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def is_over(self) -> bool:
        """Whether the last token, which was drawn, ends it."""
        sampling, num_generated = self.sampling, self.num_generated
        is_end = sampling.ends_with(self.token_ids[-1], num_generated)
        return is_end or num_generated == sampling.max_tokens

    def forced(self) -> tuple[int, ...]:
        answer = self.token_ids[self.num_prompt :]
        return () if self.constraint is None else self.constraint.forced(answer)


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
    has_penalty = s.repetition_penalty != 1 or s.frequency_penalty or s.presence_penalty
    masks = known.constraint is not None or s.masks_ends(known.num_generated)
    return bool(s.logit_bias or has_penalty or masks)


def _scaled(logits: Floats, penalty: np.float32) -> Floats:
    """Divided by the penalty if positive, else multiplied; as large as a float32 can be at most.

    A penalty may be as small as floats go, and as a float32 it may be 0.
    """
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        scaled = np.where(logits > 0, logits / penalty, logits * penalty)
    return np.minimum(scaled, np.finfo(np.float32).max)


def _reasons(row: Floats, known: SequenceState) -> bool:
    """Whether the model begins with reasoning of itself, not for want of an allowed token."""
    tags = known.sampling.grammar_tags
    return tags is not None and known.num_generated == 0 and int(row.argmax()) == tags[0]


def _adjust(row: Floats, known: SequenceState) -> None:
    s = known.sampling
    reasons = _reasons(row, known)
    for token_id, bias in s.logit_bias.items():
        row[token_id] += np.float32(bias)
    if s.repetition_penalty != 1:
        known.seen.take(known.token_ids)
        seen = known.seen.token_ids
        row[seen] = _scaled(row[seen], np.float32(s.repetition_penalty))
    if s.frequency_penalty or s.presence_penalty:
        known.drawn.take(known.token_ids)
        penalties = s.frequency_penalty * known.drawn.counts + s.presence_penalty
        row[known.drawn.token_ids] -= penalties.astype(np.float32)
    if known.constraint is not None:
        allowed = known.constraint.allowed(known.token_ids[known.num_prompt :])
        if reasons and s.grammar_tags:
            allowed[s.grammar_tags[0]] = True
        row[~allowed] = -np.inf
    elif s.masks_ends(known.num_generated):
        row[list(s.end_token_ids)] = -np.inf
