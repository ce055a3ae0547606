"""Whether one more sequence may start in a plan; takes no memory itself."""

from headrace.memory.memory import Match, Memory
from headrace.scheduler.sequence import Sequence

MAX_PASSED_OVER = 16  # behind so many that lack blocks nobody starts


class Places:
    """The rules of starting for one plan, asked in key order."""

    def __init__(self, memory: Memory, num_seats: int, first_due: float | None, now: float) -> None:
        """`num_seats` may start; if `first_due` is given, only those due before it."""
        self._memory = memory
        self._num_seats = num_seats
        self._first_due = first_due
        self._now = now
        self._num_passed_over = 0

    @property
    def is_open(self) -> bool:
        return self._num_seats > 0 and self._num_passed_over < MAX_PASSED_OVER

    def has_place(
        self, sequence: Sequence, match: Match, num_positions: int, num_running: int
    ) -> bool:
        """Whether it may start now; a refusal may close the plan to all that come later."""
        is_too_late = self._first_due is not None and sequence.due >= self._first_due
        if is_too_late or not self._memory.has_slot:
            self.close()
            return False
        if self._memory.can_reserve(match, num_positions, num_running):
            return True
        self._num_passed_over += 1
        if self._now >= sequence.due:
            self.close()
        return False

    def has_place_beside(self, leader: Sequence, num_running: int) -> bool:
        """Whether a sibling may start on the memory of its leader, whose prompt ends now."""
        return self.is_open and self._memory.can_fork(leader.num_tokens, num_running)

    def close(self) -> None:
        self._num_seats = 0

    def taken(self) -> None:
        self._num_seats -= 1
