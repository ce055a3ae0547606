"""News of a stream that waits: signs of life, its place in the queue, progress of its prompt."""

import math

import msgspec
from msgspec import UNSET, UnsetType

from headrace.fleet.tenants import InQueue
from headrace.generation.choice import ChoiceWriter
from headrace.generation.prompt_report import NO_CHUNKS, ChunkCount
from headrace.streams import events

_NUM_UNTHROTTLED = 16
_INTERVAL_MS = 100
_QUEUE_INTERVAL_MS = 1000


class Beat(msgspec.Struct, frozen=True):
    """Asks for a heartbeat event."""

    state: str
    form: str
    attempt: int | None = None
    progress: float | None = None  # of the model's load
    stage: str = ""  # of that load


class Heartbeats:
    """The heartbeats of a log, one for all readers: who asks within half an interval means it.

    `new` ones are those that no event has told yet.
    """

    def __init__(self) -> None:
        self.new: list[Beat] = []
        self._at_ms: dict[str, float] = {}  # when the last of each form was taken up

    def wants(self, form: str, interval_s: float, at_ms: int) -> bool:
        """Whether another one is to be added, which is then on its way."""
        if at_ms - self._at_ms.get(form, -math.inf) < 500 * interval_s:
            return False
        self._at_ms[form] = math.inf
        return True

    def add(self, beat: Beat, at_ms: int) -> None:
        self.new.append(beat)
        self._at_ms[beat.form] = at_ms


class QueueProgress:
    """The queued events: at once, then when the place has changed, at most once a second."""

    def __init__(self) -> None:
        self.place: InQueue | None = None  # None once the sequence has left the queue
        self._told: InQueue | None = None
        self._due_ms = 0

    def wants(self, place: InQueue, at_ms: int) -> bool:
        """Whether this place would be told now."""
        is_told = self._told is not None and self._told.position == place.position
        return not is_told and at_ms >= self._due_ms

    def take(self, seq: int, at_ms: int) -> events.Queued | None:
        """The event that is due, if any."""
        place = self.place
        if place is None or not self.wants(place, at_ms):
            return None
        self._told, self._due_ms = place, at_ms + _QUEUE_INTERVAL_MS
        return events.Queued(seq=seq, at_ms=at_ms, **msgspec.structs.asdict(place))


class PromptProgress:
    """The progress events of one prompt: those of its first choice, never going back."""

    def __init__(self, choice: int, tells_chunks: bool = False) -> None:
        self.chunks = NO_CHUNKS
        self._choice, self._tells_chunks = choice, tells_chunks
        self._total = self.num_cached = 0
        self._processed = self._told = -1
        self._began_ms = 0
        self._num_told = self._due_ms = 0

    @property
    def num_processed(self) -> int:
        return max(self._processed, 0)

    @property
    def has_news(self) -> bool:
        """Whether something is untold, due or not."""
        return self._processed != self._told

    def start(self, choice: ChoiceWriter, total: int, cached: int, at_ms: int) -> None:
        if choice.index == self._choice and self._processed < 0:
            self._total, self.num_cached, self._processed = total, cached, cached
            self._began_ms = at_ms

    def advance(self, choice: ChoiceWriter, processed: int) -> None:
        processed = min(processed, self._total)
        if choice.index == self._choice and processed > self._processed:
            self.chunks = self.chunks.with_one(processed - max(self._processed, 0))
            self._processed = processed

    def resume(self, told: events.Progress) -> None:
        """Goes on behind an event that was told in an earlier life."""
        self._total, self.num_cached = told.total, told.cache
        self._processed = self._told = told.processed
        self._began_ms = told.at_ms - told.time_ms
        if not isinstance(told.chunks, UnsetType):
            self.chunks = ChunkCount(*told.chunks)

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
            cache=self.num_cached,
            processed=self._processed,
            time_ms=at_ms - self._began_ms,
            chunks=self.chunks if self._tells_chunks else UNSET,
        )
