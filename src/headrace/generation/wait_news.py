"""Builds the events of a waiting stream: heartbeats, queue positions and prompt progress."""

import math
from typing import NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from headrace.fleet.engine_users import InQueue
from headrace.generation.choice import ChoiceWriter
from headrace.streams import events

_NUM_UNTHROTTLED = 16
_INTERVAL_MS = 100
_QUEUE_INTERVAL_MS = 1000


class HeartbeatNews(msgspec.Struct, frozen=True):
    """Asks for a heartbeat event."""

    state: str
    form: str
    attempt: int | None = None
    # The progress of the model's load, from 0 to 1.
    progress: float | None = None
    # The stage of the model's load.
    stage: str = ""


class Heartbeats:
    """The heartbeats of a log, shared by all readers.

    A request within half an interval of the last heartbeat adds nothing. `new` holds the
    heartbeats that have no event yet.
    """

    def __init__(self) -> None:
        self.new: list[HeartbeatNews] = []
        # The time of the last heartbeat of each form, in milliseconds. The time is infinite while a
        # heartbeat is being added.
        self._at_ms: dict[str, float] = {}

    def wants(self, form: str, interval_s: float, at_ms: int) -> bool:
        """Return whether a heartbeat is due. If so, the caller must add the heartbeat."""
        if at_ms - self._at_ms.get(form, -math.inf) < 500 * interval_s:
            return False
        self._at_ms[form] = math.inf
        return True

    def add(self, beat: HeartbeatNews, at_ms: int) -> None:
        self.new.append(beat)
        self._at_ms[beat.form] = at_ms


class QueueProgress:
    """Makes Queued events: the first immediately, then one per new position, at most one per
    second.
    """

    def __init__(self) -> None:
        # None before the first position, and after the sequence has left the queue.
        self.place: InQueue | None = None
        self._reported: InQueue | None = None
        self._due_ms = 0

    def move_to(self, place: InQueue | None) -> None:
        """Set the queue position; None once the sequence has left the queue."""
        self.place = place

    def wants(self, place: InQueue, at_ms: int) -> bool:
        """Return whether this position would be reported now."""
        is_reported = self._reported is not None and self._reported.position == place.position
        return not is_reported and at_ms >= self._due_ms

    def take(self, seq: int, at_ms: int) -> events.Queued | None:
        """Return the event that is due, or None."""
        place = self.place
        if place is None or not self.wants(place, at_ms):
            return None
        self._reported, self._due_ms = place, at_ms + _QUEUE_INTERVAL_MS
        return events.Queued(seq=seq, at_ms=at_ms, **msgspec.structs.asdict(place))


class ChunkCount(NamedTuple):
    """The number of chunks of a prompt, and the token counts of the smallest and the largest
    chunk.
    """

    number: int
    smallest: int
    largest: int

    def with_one(self, tokens: int) -> "ChunkCount":
        smallest = min(self.smallest, tokens) if self.number else tokens
        return ChunkCount(self.number + 1, smallest, max(self.largest, tokens))


NO_CHUNKS = ChunkCount(0, 0, 0)


class PromptProgress:
    """Makes the Progress events of one prompt, from the reports on the prompt's first choice.

    The reported progress never decreases.
    """

    def __init__(self, choice: int, has_chunks: bool = False) -> None:
        self.chunks = NO_CHUNKS
        self._choice, self._has_chunks = choice, has_chunks
        self._total = self.num_cached = 0
        self._processed = self._reported = -1
        self._began_ms = 0
        self._num_reported = self._due_ms = 0

    @property
    def num_processed(self) -> int:
        return max(self._processed, 0)

    @property
    def has_news(self) -> bool:
        """Return whether there is progress that no event reports yet, even if no event is due."""
        return self._processed != self._reported

    def start(self, choice: ChoiceWriter, total: int, cached: int, at_ms: int) -> None:
        if choice.index == self._choice and self._processed < 0:
            self._total, self.num_cached, self._processed = total, cached, cached
            self._began_ms = at_ms

    def advance(self, choice: ChoiceWriter, processed: int) -> None:
        processed = min(processed, self._total)
        if choice.index == self._choice and processed > self._processed:
            self.chunks = self.chunks.with_one(processed - max(self._processed, 0))
            self._processed = processed

    def resume(self, logged: events.Progress) -> None:
        """Continue after a Progress event that an earlier process wrote."""
        self._total, self.num_cached = logged.total, logged.cache
        self._processed = self._reported = logged.processed
        self._began_ms = logged.at_ms - logged.time_ms
        if not isinstance(logged.chunks, UnsetType):
            self.chunks = ChunkCount(*logged.chunks)

    def take(self, seq: int, at_ms: int) -> events.Progress | None:
        """Return the event that is due, or None."""
        is_last = self._processed == self._total
        if self._processed == self._reported or (at_ms < self._due_ms and not is_last):
            return None
        self._reported = self._processed
        self._num_reported += 1
        if self._num_reported >= _NUM_UNTHROTTLED:
            self._due_ms = at_ms + _INTERVAL_MS
        return events.Progress(
            seq=seq,
            at_ms=at_ms,
            choice=self._choice,
            total=self._total,
            cache=self.num_cached,
            processed=self._processed,
            time_ms=at_ms - self._began_ms,
            chunks=self.chunks if self._has_chunks else UNSET,
        )
