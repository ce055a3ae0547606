"""Whether one more sequence may start in a plan; takes no memory itself."""

from headrace.memory.memory import Memory
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

    def has_place(self, sequence: Sequence, num_running: int) -> bool:
        """Whether it may start now; a refusal may close the plan to all that come later."""
        is_too_late = self._first_due is not None and sequence.due >= self._first_due
        if is_too_late or not self._memory.has_slot:
            self._num_seats = 0
            return False
        if self._memory.can_reserve(sequence.num_tokens, num_running):
            return True
        self._num_passed_over += 1
        if self._now >= sequence.due:
            self._num_seats = 0
        return False

    def taken(self) -> None:
        self._num_seats -= 1
