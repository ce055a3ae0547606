"""The order in which waiting sequences and open prompts get their turn; decides no amounts."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from headrace.scheduler.sequence import Sequence

PRIORITY_LEVEL_S = 10.0  # what one level of priority is worth
by_key = attrgetter("key")
by_rank = attrgetter("rank")


def due_time(arrival: float, patience: float, alone: float, priority: int) -> float:
    """When a prompt that takes `alone` seconds by itself should have had its turn.

    Long prompts are due later, but at a fixed time: ageing without a clock.
    """
    return arrival + patience * alone + PRIORITY_LEVEL_S * priority


class WaitingQueue:
    """Waiting sequences, the next one first."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def push(self, sequence: Sequence) -> None:
        insort(self._sequences, sequence, key=by_key)

    def remove(self, sequence: Sequence) -> None:
        del self._sequences[bisect_left(self._sequences, sequence.key, key=by_key)]


class Walk:
    """Open prompts and waiting sequences together in key order, until starting is over."""

    def __init__(self, opened: list[Sequence], waiting: list[Sequence]) -> None:
        self._opened = sorted(opened, key=by_key, reverse=True)
        self._waiting = iter(waiting)
        self._next_waiting = next(self._waiting, None)

    def stop_starting(self) -> None:
        """Only open prompts from here on."""
        self._next_waiting = None

    def __iter__(self) -> Iterator[Sequence]:
        while self._opened or self._next_waiting is not None:
            waiting = self._next_waiting
            if waiting is None or (self._opened and self._opened[-1].key < waiting.key):
                yield self._opened.pop()
            else:
                self._next_waiting = next(self._waiting, None)
                yield waiting
