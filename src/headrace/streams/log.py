"""The event log of one stream: one writer, many readers, a cursor each."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from headrace.streams.events import AnyEvent, Error, Finish
from headrace_common.errors import RequestError
from headrace_common.ids import StreamId

_PAGE = 256


class Log(Protocol):
    """The log that a writer and its readers share; the store decides what durable means."""

    @property
    def next_seq(self) -> int:
        """How many events can be read: the number of the next one to come."""

    async def append(self, expected_seq: int, events: Sequence[AnyEvent]) -> None:
        """Returns when the events are durable; only then can a reader see them.

        Raises LogConflict if the first event is not number `expected_seq`, if the log has ended,
        and if another writer has claimed it since. A cancelled append may still become durable.
        """

    async def settle(self) -> None:
        """Returns once it is known what became of all appends so far, cancelled ones too."""

    async def read(self, after: int, limit: int) -> tuple[Sequence[AnyEvent], bool]:
        """Events that follow number `after`, and whether nothing will ever follow them.

        Raises LogGone if the stream was forgotten, LogUnsound if what is stored of it is damaged.
        """

    async def wait(self, after: int) -> None:
        """Returns once an event that follows number `after` can be read, or the log has ended."""


class LogConflict(Exception):
    """An append that does not continue the log; a bug of its writer."""


class LogTaken(LogConflict):
    """An append by a writer whose log another server has claimed since."""


class LogGone(Exception):
    """The stream was forgotten while somebody still read or wrote its log."""


class LogUnsound(RequestError):
    """A stored stream is not as it was written, so none of it is served.

    `row` is its number in the store. `reason` says what is damaged; it is empty if the server's
    log has said so before. `owner` and `conversation` are None where they cannot be trusted.
    """

    def __init__(
        self,
        row: int,
        stream_id: StreamId,
        reason: str,
        owner: str | None = None,
        conversation: str | None = None,
    ) -> None:
        super().__init__(
            "stream_unsound",
            "This stream is damaged on disk, and none of it can be sent. Delete it, or send the "
            "request again; other streams are not affected.",
        )
        self.row = row
        self.stream_id = stream_id
        self.reason = reason
        self.owner = owner
        self.conversation = conversation


class Tail:
    """The newest events of a log in memory, and the readers that wait for more.

    Only durable events enter it. With `keep` it holds the last `keep` to 2 x `keep` events,
    without it all of them. `gone` is set once the stream was forgotten or found to be damaged.
    For the event loop's thread only.
    """

    __slots__ = ("_keep", "_waiting", "events", "gone", "has_ended", "next_seq")

    def __init__(self, next_seq: int = 0, has_ended: bool = False, keep: int | None = None) -> None:
        self.next_seq = next_seq
        self.has_ended = has_ended
        self.gone: LogGone | LogUnsound | None = None
        self.events: list[AnyEvent] = []  # oldest first
        self._keep = keep
        self._waiting: set[asyncio.Future[None]] = set()

    def extend(self, events: Sequence[AnyEvent]) -> None:
        self.events.extend(events)
        self.next_seq += len(events)
        self.has_ended = bool(events) and isinstance(events[-1], Finish | Error)
        if self._keep is not None and len(self.events) >= 2 * self._keep:
            del self.events[: -self._keep]
        if self._waiting:
            self._wake()

    def forget(self, why: LogUnsound | None = None) -> None:
        self.gone = why or LogGone()
        self.events = []
        self._wake()

    def read(self, after: int, limit: int) -> list[AnyEvent] | None:
        """Up to `limit` events that follow number `after`; None if the first was dropped."""
        if self.gone is not None:
            raise self.gone.with_traceback(None)  # raised often: it would grow
        start = after + 1 - (self.next_seq - len(self.events))
        return self.events[start : start + limit] if start >= 0 else None

    def ends_with(self, seq: int) -> bool:
        """Whether no event follows number `seq`, now or later."""
        return self.has_ended and seq + 1 >= self.next_seq

    async def wait(self, after: int) -> None:
        if after + 1 < self.next_seq or self.has_ended or self.gone is not None:
            return
        future = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            await future
        finally:
            self._waiting.discard(future)

    def _wake(self) -> None:
        for future in self._waiting:
            if not future.done():
                future.set_result(None)
        self._waiting.clear()


class MemoryLog:
    """A log that lives as long as the process."""

    def __init__(self) -> None:
        self.tail = Tail()
        self.wait = self.tail.wait

    @property
    def next_seq(self) -> int:
        return self.tail.next_seq

    async def append(self, expected_seq: int, events: Sequence[AnyEvent]) -> None:
        tail = self.tail
        if expected_seq != tail.next_seq or tail.has_ended or tail.gone is not None:
            raise LogConflict(f"append at {expected_seq} to a log of {tail.next_seq}")
        tail.extend(events)

    async def settle(self) -> None:
        """Nothing is ever under way."""

    async def read(self, after: int, limit: int) -> tuple[Sequence[AnyEvent], bool]:
        # Every reader calls this for each token, so it does without Tail.read. This tail drops
        # no events.
        tail = self.tail
        if tail.gone is not None:
            raise tail.gone.with_traceback(None)
        events = tail.events[after + 1 : after + 1 + limit]
        return events, tail.has_ended and after + 1 + len(events) >= tail.next_seq


async def follow(log: Log, after: int = -1) -> AsyncIterator[AnyEvent]:
    """Every event after the cursor, those to come included, up to the terminal one."""
    has_ended = False
    while not has_ended:
        await log.wait(after)
        events, has_ended = await log.read(after, _PAGE)
        for event in events:
            yield event
        after += len(events)
        if len(events) == _PAGE:
            await asyncio.sleep(0)  # a long log must not keep others from their turn
