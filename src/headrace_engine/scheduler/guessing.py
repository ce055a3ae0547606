"""Chooses how many guessed tokens a step computes, to maximize the tokens per second."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from headrace_engine.memory.memory import Memory
from headrace_engine.scheduler.budget import Limits, TimeBudget
from headrace_engine.scheduler.guess import Guess, Guesser, OwnGuesser
from headrace_engine.scheduler.sequence import Sequence
from headrace_engine.scheduler.step import PlannedStep

# With more streams than this, nothing is guessed, because the search would delay all streams.
MAX_STREAMS = 8
# Guesses are added only if the expected tokens per second increase by at least 2 %.
_GAIN = 1.02
MakeGuesser = Callable[[Sequence], Guesser]


class _Candidate(NamedTuple):
    # The index of the sequence's chunk in the step.
    chunk_index: int
    sequence: Sequence
    guess: Guess


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

    def add_to(self, step: PlannedStep, decoders: list[Sequence], num_running: int) -> None:
        """Append guesses to the step's first chunks, which are the decode chunks of `decoders`.

        One block is left free for each of the `num_running` sequences.
        """
        if len(decoders) > MAX_STREAMS or not step.only_decodes:
            return
        candidates = [
            _Candidate(index, sequence, guess)
            for index, sequence in enumerate(decoders)
            if (guess := self._guess(sequence, step.chunks[index].length - 1)).token_ids
        ]
        if not candidates:
            return
        for candidate, count in zip(candidates, self._counts(step, candidates), strict=True):
            sequence = candidate.sequence
            fitting = self._memory.stretch(sequence.held, sequence.num_tokens + count, num_running)
            count = min(count, fitting - sequence.num_tokens)
            if count > 0 and self._memory.can_go_back(sequence.held):
                step.guess(candidate.chunk_index, sequence, candidate.guess.token_ids[:count])

    def _guess(self, sequence: Sequence, num_to_recompute: int) -> Guess:
        """Return a guess for a sequence.

        The guess is empty for a suspect of a failed step, and while another launched step names
        the sequence. A chunk with guesses never ends where a snapshot is due. The chunk computes
        `num_to_recompute` tokens again; these tokens count towards the limit of guesses.
        """
        most = self._limits.max_guess - num_to_recompute
        most = min(most, sequence.max_total - sequence.num_tokens - 1)
        stop = self._memory.snapshot_stop(sequence.num_tokens - 1, sequence.num_prompt)
        if stop is not None:
            most = min(most, stop - sequence.num_tokens - 1)
        is_free = sequence.num_in_flight == 1 and sequence.clears_at is None
        if most <= 0 or not is_free or not sequence.sampling.guess:
            return Guess()
        return sequence.guess(self._make_guesser, most)

    def _counts(self, step: PlannedStep, candidates: list[_Candidate]) -> list[int]:
        """Return how many guessed tokens of each candidate to use.

        Guessed tokens are added in order of probability. Each guessed token adds its probability
        to the expected number of tokens, and adds a row to the step's time. The method chooses
        the number of guessed tokens that gives the most tokens per second. If the rate does not
        exceed `_GAIN` times the rate without guesses, nothing is guessed. The step stays within
        the stall target and the token limit.
        """
        num_chunks, times = step.num_decoding, self._budget.rows
        assert times is not None, "row times are measured if guesses are allowed"
        num_rows = step.shape.num_new
        alone = times.seconds(num_chunks, num_rows)
        if not alone:
            return [0] * len(candidates)
        order = sorted(
            (-chance, number)
            for number, candidate in enumerate(candidates)
            for chance in candidate.guess.chances
        )
        value, shape = float(num_chunks), replace(step.shape)
        best, best_rate, counts = 0, _GAIN * value / alone, [0] * len(candidates)
        for num_guesses, (chance, number) in enumerate(order, 1):
            chunk = step.chunks[candidates[number].chunk_index]
            shape.extend(chunk.start, chunk.length + counts[number])
            counts[number] += 1
            value -= chance
            seconds = times.seconds(num_chunks, num_rows + num_guesses)
            is_over = step.room is not None and seconds - alone > step.room
            if is_over or shape.num_new > self._limits.max_step_tokens:
                break
            if not self._budget.is_in_time(shape, self._budget.model.predict(shape)):
                break
            if value / seconds > best_rate:
                best, best_rate = num_guesses, value / seconds
        chosen = [number for _, number in order[:best]]
        return [chosen.count(number) for number in range(len(candidates))]
