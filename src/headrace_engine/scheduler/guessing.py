"""Chooses how many guessed tokens a step processes, to maximize the tokens per second."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from headrace_engine.memory.memory import Memory
from headrace_engine.scheduler.budget import Limits, TimeBudget
from headrace_engine.scheduler.cost import StepShape
from headrace_engine.scheduler.guess import DraftChance, Guess, Guesser, OwnGuesser
from headrace_engine.scheduler.sequence import Sequence
from headrace_engine.scheduler.step import PlannedStep

# With more streams than this, nothing is guessed, because the search would delay all streams.
MAX_STREAMS = 8
# Guesses are added only if the expected tokens per second increase by at least 2 %.
_GAIN = 1.02
# The draft model processes at most this many tokens of a sequence in a decode step. A sequence with
# more unread (unprocessed) tokens first catches up, by this many tokens per step.
MAX_UNREAD = 64
MakeGuesser = Callable[[Sequence], Guesser]


class _Choice(NamedTuple):
    rate: float  # expected tokens per second
    counts: list[int]  # for each candidate, how many guessed tokens to use


def own_guesser(sequence: Sequence) -> Guesser:
    """Make a guesser that uses only the sequence's tokens."""
    return OwnGuesser()


class Guessing:
    """Adds guesses to steps that have only decode chunks."""

    def __init__(
        self, limits: Limits, budget: TimeBudget, memory: Memory, make_guesser: MakeGuesser
    ) -> None:
        self._make_guesser = make_guesser
        self._limits = limits
        self._budget = budget
        self._memory = memory
        self._usual = DraftChance()

    def add_to(self, step: PlannedStep, decoders: list[Sequence], num_running: int) -> None:
        """Append guesses to the step's first chunks, which are the decode chunks of `decoders`.

        One block is left free for each of the `num_running` sequences.
        """
        if len(decoders) > MAX_STREAMS or not step.only_decodes:
            return
        limits = [
            self._limit(sequence, step.chunks[index].length - 1)
            for index, sequence in enumerate(decoders)
        ]
        own = [
            sequence.guess(self._make_guesser, most) if most > 0 else Guess()
            for sequence, most in zip(decoders, limits, strict=True)
        ]
        guesses, choice = own, self._choose(step, decoders, own)
        if self._limits.max_draft:
            drafted = list(map(self._drafted, decoders, limits, own))
            if drafted != own:
                other = self._choose(step, decoders, drafted)
                if other.rate > choice.rate:
                    guesses, choice = drafted, other
        for index, count in enumerate(choice.counts):
            sequence = decoders[index]
            if not count:
                continue
            fitting = self._memory.stretch(sequence.held, sequence.num_tokens + count, num_running)
            count = min(count, fitting - sequence.num_tokens)
            if count > 0 and self._memory.can_go_back(sequence.held):
                step.guess(index, sequence, guesses[index].token_ids[:count])
        if self._limits.max_draft:
            self._catch_up(step, decoders)

    def _drafted(self, sequence: Sequence, most: int, own: Guess) -> Guess:
        """Return a guess by the draft model if more tokens are expected than from `own`."""
        num_tokens = sequence.num_tokens
        most = min(most, self._limits.max_draft - num_tokens + 1)
        if most <= 0 or num_tokens - sequence.num_draft_read > MAX_UNREAD:
            return own
        guess = sequence.guess_drafts(self._usual, most)
        return guess if guess.num_expected > own.num_expected else own

    def _catch_up(self, step: PlannedStep, decoders: list[Sequence]) -> None:
        """Let the draft model process tokens of the first sequence that has MAX_UNREAD unread."""
        for index, sequence in enumerate(decoders):
            chunk, end = step.chunks[index], sequence.num_draft_read + MAX_UNREAD
            is_late = end <= chunk.start and not chunk.is_drafted
            if not is_late or end > self._limits.max_draft or not sequence.sampling.guess:
                continue
            shape = StepShape()
            shape.draft(sequence.num_draft_read, MAX_UNREAD, 0)
            if step.room is None or self._budget.seconds_hoped(shape.drafted) <= step.room:
                step.catch_up_by_draft(index, sequence, end)
            return

    def _limit(self, sequence: Sequence, num_to_recompute: int) -> int:
        """Return how many tokens may be guessed for a sequence.

        The limit is 0 if the sequence is suspected of having made a step fail, and while another
        launched step includes the sequence. A chunk with guesses never ends where a snapshot is
        due. The chunk processes `num_to_recompute` tokens again, which lower the limit.
        """
        most = self._limits.max_guess - num_to_recompute
        most = min(most, sequence.max_total - sequence.num_tokens - 1)
        stop = self._memory.snapshot_stop(sequence.num_tokens - 1, sequence.num_prompt)
        if stop is not None:
            most = min(most, stop - sequence.num_tokens - 1)
        is_free = sequence.num_in_flight == 1 and sequence.clears_at is None
        return max(0, most) if is_free and sequence.sampling.guess else 0

    def _choose(self, step: PlannedStep, decoders: list[Sequence], guesses: list[Guess]) -> _Choice:
        """Return how many guessed tokens of each sequence to use.

        Guessed tokens are added in order of probability. Each guessed token adds its probability
        to the expected number of tokens, and adds a row to the step's time. Tokens of the draft
        model also add the predicted time in that model. The method chooses the number of guessed
        tokens that gives the most tokens per second. If the rate does not exceed `_GAIN` times the
        rate without guesses, nothing is guessed. The step stays within the stall target and the
        token limit.
        """
        num_chunks, times = step.num_decoding, self._budget.rows
        assert times is not None, "row times are measured if guesses are allowed"
        num_rows = step.shape.num_new
        alone = times.seconds(num_chunks, num_rows)
        order = sorted(
            (-chance, number) for number, guess in enumerate(guesses) for chance in guess.chances
        )
        if not alone or not order:
            return _Choice(0.0, [0] * len(guesses))
        value, shape = float(num_chunks), replace(step.shape)
        best, best_rate, counts = 0, _GAIN * value / alone, [0] * len(guesses)
        for num_guesses, (chance, number) in enumerate(order, 1):
            chunk = step.chunks[number]
            shape.extend(chunk.start, chunk.length + counts[number])
            counts[number] += 1
            value -= chance
            seconds = times.seconds(num_chunks, num_rows + num_guesses)
            if guesses[number].is_drafted:
                drafted = _in_draft_model(step, decoders, guesses, counts)
                shape = replace(shape, drafted=drafted)
            seconds += self._budget.seconds_hoped(shape.drafted)
            is_over = step.room is not None and seconds - alone > step.room
            if is_over or shape.num_new > self._limits.max_step_tokens:
                break
            if not self._budget.is_in_time(shape, self._budget.model.predict(shape)):
                break
            if value / seconds > best_rate:
                best, best_rate = num_guesses, value / seconds
        chosen = [number for _, number in order[:best]]
        return _Choice(best_rate, [chosen.count(number) for number in range(len(guesses))])


def _in_draft_model(
    step: PlannedStep, decoders: list[Sequence], guesses: list[Guess], counts: list[int]
) -> StepShape | None:
    """Return the work of the draft model to choose `counts` tokens of each sequence."""
    shape = StepShape()
    for chunk, sequence, guess, count in zip(step.chunks, decoders, guesses, counts, strict=True):
        if count and guess.is_drafted:
            start = sequence.num_draft_read
            shape.draft(start, chunk.start + chunk.length - start, count)
    return shape.drafted
