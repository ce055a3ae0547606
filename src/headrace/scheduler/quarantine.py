"""Sequences suspected of having made a step fail, and whose turn it is; runs nothing itself."""

from collections.abc import Iterable

from headrace.scheduler.queue import by_rank
from headrace.scheduler.sequence import Sequence

MAX_FAILED_ALONE = 3


class Quarantine:
    """Suspects run alone, one after the other, in every other step."""

    def __init__(self) -> None:
        self._suspects: set[Sequence] = set()
        self._is_turn = True
        self._num_failed_alone = 0

    def __bool__(self) -> bool:
        return bool(self._suspects)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._suspects

    @property
    def is_turn(self) -> bool:
        """Whether the next step is a suspect's, if both sides have something to do."""
        return bool(self._suspects) and self._is_turn

    @property
    def is_hopeless(self) -> bool:
        """Whether so many failed alone, with no good step between, that the engine is to blame."""
        return self._num_failed_alone >= MAX_FAILED_ALONE

    def current(self) -> Sequence:
        """The suspect under trial: the one that runs, else the newest."""
        running = [suspect for suspect in self._suspects if suspect.lease is not None]
        return max(running or self._suspects, key=by_rank)

    def took_turn(self, alone: bool) -> None:
        self._is_turn = not alone

    def suspect(self, sequence: Sequence, clears_at: int) -> None:
        """Hold a sequence until a step has computed its first `clears_at` tokens."""
        sequence.clears_at = max(clears_at, sequence.clears_at or 0)
        self._suspects.add(sequence)

    def failed_alone(self) -> None:
        self._num_failed_alone += 1

    def step_was_good(self, sequences: Iterable[Sequence]) -> None:
        self._num_failed_alone = 0
        for sequence in sequences:
            if sequence.clears_at is not None and sequence.num_computed >= sequence.clears_at:
                self.discard(sequence)

    def discard(self, sequence: Sequence) -> None:
        sequence.clears_at = None
        self._suspects.discard(sequence)
