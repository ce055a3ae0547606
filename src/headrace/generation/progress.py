"""How a stream stands before its first token: place in the queue, prompt processed so far."""

import msgspec

from headrace.generation.choice import Choice
from headrace.streams import events

_NUM_UNTHROTTLED = 16
_INTERVAL_MS = 100
_QUEUE_INTERVAL_MS = 1000


class InQueue(msgspec.Struct, frozen=True):
    """Where the stream stands in the engine's queue; 1 is next."""

    position: int
    waiting: int
    eta_ms: int | None


class QueueProgress:
    """The queued events: at once, then when the place has changed, at most once a second."""

    def __init__(self) -> None:
        self._place: InQueue | None = None
        self._told: InQueue | None = None
        self._due_ms = 0

    def move(self, place: InQueue | None) -> None:
        """A new place; None once the sequence has left the queue."""
        self._place = place

    def take(self, seq: int, at_ms: int) -> events.Queued | None:
        """The event that is due, if any."""
        place = self._place
        if place is None or at_ms < self._due_ms:
            return None
        if self._told is not None and self._told.position == place.position:
            return None
        self._told, self._due_ms = place, at_ms + _QUEUE_INTERVAL_MS
        return events.Queued(
            seq=seq,
            at_ms=at_ms,
            position=place.position,
            waiting=place.waiting,
            eta_ms=place.eta_ms,
        )


class PromptProgress:
    """The progress events of one prompt: those of its first choice, never going back."""

    def __init__(self, choice: int) -> None:
        self._choice = choice
        self._total = self._cached = 0
        self._processed = self._told = -1
        self._began_ms = 0
        self._num_told = self._due_ms = 0

    @property
    def has_news(self) -> bool:
        """Whether something is untold, due or not."""
        return self._processed != self._told

    def start(self, choice: Choice, total: int, cached: int, at_ms: int) -> None:
        if choice.index == self._choice and self._processed < 0:
            self._total, self._cached, self._processed = total, cached, cached
            self._began_ms = at_ms

    def advance(self, choice: Choice, processed: int) -> None:
        if choice.index == self._choice:
            self._processed = max(self._processed, min(processed, self._total))

    def resume(self, told: events.Progress) -> None:
        """Goes on behind an event that was told in an earlier life."""
        self._total, self._cached = told.total, told.cache
        self._processed = self._told = told.processed
        self._began_ms = told.at_ms - told.time_ms

    def take(self, seq: int, at_ms: int) -> events.Progress | None:
        """The event that is due, if any."""
        is_last = self._processed == self._total
        if self._processed == self._told or (at_ms < self._due_ms and not is_last):
            return None
        self._told = self._processed
        self._num_told += 1
        if self._num_told >= _NUM_UNTHROTTLED:
            self._due_ms = at_ms + _INTERVAL_MS
        return events.Progress(
            seq=seq,
            at_ms=at_ms,
            choice=self._choice,
            total=self._total,
            cache=self._cached,
            processed=self._processed,
            time_ms=at_ms - self._began_ms,
        )
