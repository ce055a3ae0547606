"""How many guessed tokens a step takes: as many as bring the most tokens a second; pure."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from headrace_engine.memory.memory import Memory
from headrace_engine.scheduler.budget import Limits, TimeBudget
from headrace_engine.scheduler.guess import Guess, Guesser, OwnGuesser
from headrace_engine.scheduler.sequence import Sequence
from headrace_engine.scheduler.step import PlannedStep

MAX_STREAMS = 8  # beside more, none guesses: looking would take its time from all
_GAIN = 1.02  # what guessing must bring at least, by the figures
MakeGuesser = Callable[[Sequence], Guesser]


class _Candidate(NamedTuple):
    place: int  # of its chunk in the step
    sequence: Sequence
    guess: Guess


def own_guesser(sequence: Sequence) -> Guesser:
    """Make a guesser that uses only the tokens of the sequence."""
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
        """`decoders` have the step's chunks, in this order; each running one keeps a block."""
        if len(decoders) > MAX_STREAMS or not step.only_decodes:
            return
        candidates = [
            _Candidate(place, sequence, guess)
            for place, sequence in enumerate(decoders)
            if (guess := self._guess(sequence, step.chunks[place].length - 1)).token_ids
        ]
        if not candidates:
            return
        for candidate, count in zip(candidates, self._counts(step, candidates), strict=True):
            sequence = candidate.sequence
            fitting = self._memory.stretch(sequence.held, sequence.num_tokens + count, num_running)
            count = min(count, fitting - sequence.num_tokens)
            if count > 0 and self._memory.can_go_back(sequence.held):
                step.guess(candidate.place, sequence, candidate.guess.token_ids[:count])

    def _guess(self, sequence: Sequence, num_again: int) -> Guess:
        """None for a suspect, nor behind a token that another step in flight draws.

        No chunk with guesses ends where a state is saved. What its state takes in again counts.
        """
        most = self._limits.max_guess - num_again
        most = min(most, sequence.max_total - sequence.num_tokens - 1)
        stop = self._memory.snapshot_stop(sequence.num_tokens - 1, sequence.num_prompt)
        if stop is not None:
            most = min(most, stop - sequence.num_tokens - 1)
        is_free = sequence.num_in_flight == 1 and sequence.clears_at is None
        if most <= 0 or not is_free or not sequence.sampling.guess:
            return Guess()
        return sequence.guess(self._make_guesser, most)

    def _counts(self, step: PlannedStep, candidates: list[_Candidate]) -> list[int]:
        """How many guesses of each candidate bring the most tokens a second, the likeliest first.

        The step stays within the stall target and the token cap.
        """
        num_chunks, times = step.num_decoding, self._budget.rows
        assert times is not None, "limits that allow guesses have rows timed"
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
            chunk = step.chunks[candidates[number].place]
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
