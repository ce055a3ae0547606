"""Defines the event log of one stream, with one writer and any number of readers.

Each reader has a separate position in the log.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from headrace.streams.events import AnyEvent, Error, Finish
from headrace_common.errors import RequestError
from headrace_common.ids import StreamId

_PAGE = 256


class Log(Protocol):
    """The log that a stream's writer and readers share. The store decides when events are
    durable.
    """

    @property
    def next_seq(self) -> int:
        """Return the number of the next event, which equals the count of readable events."""

    async def append(self, expected_seq: int, events: Sequence[AnyEvent]) -> None:
        """Append events; return once the events are durable. Readers see only durable events.

        Raises LogConflict if the first event would not get number `expected_seq`, if the log has
        ended, or if another writer has claimed the log. A cancelled append may still become
        durable.
        """

    async def settle(self) -> None:
        """Wait until every append so far has succeeded or failed, including cancelled appends."""

    async def read(self, after: int, limit: int) -> tuple[Sequence[AnyEvent], bool]:
        """Return at most `limit` events after number `after`.

        The second value says whether the log ends with these events. Raises LogGone if the stream
        was deleted, and LogUnsound if the stored data are damaged.
        """

    async def wait(self, after: int) -> None:
        """Wait until an event after number `after` can be read, or the log has ended."""


class LogConflict(Exception):
    """Raised by an append that does not continue the log, which is a bug in the log's writer."""


class LogTaken(LogConflict):
    """Raised by an append of a writer whose log another server has claimed."""


class LogGone(LogConflict):
    """Raised when a stream was deleted while a reader or writer still used the stream's log."""


class LogUnsound(RequestError):
    """Raised when a stored stream is damaged. No part of a damaged stream is served.

    `row` is the stream's row number in the store. `reason` says what is damaged; it is empty if
    the server's log already reported the damage. `owner` and `conversation` are None if the
    stored values cannot be trusted.
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
            "This stream is damaged on disk and cannot be sent. Delete the stream, or send the "
            "request again; other streams are not affected.",
        )
        self.row = row
        self.stream_id = stream_id
        self.reason = reason
        self.owner = owner
        self.conversation = conversation


class Tail:
    """Holds the newest events of a log in memory and wakes the readers that wait for more.

    A tail contains only durable events: at least the newest `keep` and fewer than 2 x `keep`, or
    all events if `keep` is None. `gone` is set once the stream was deleted or found to be damaged.
    Use a tail only on the event loop's thread.
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
        """Return at most `limit` events after number `after`.

        Returns None if the first of these events is no longer in memory.
        """
        if self.gone is not None:
            # The same exception is raised often. Without the reset, its traceback would grow each
            # time.
            raise self.gone.with_traceback(None)
        start = after + 1 - (self.next_seq - len(self.events))
        return self.events[start : start + limit] if start >= 0 else None

    def ends_with(self, seq: int) -> bool:
        """Return whether the log has ended and no event follows number `seq`."""
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
            what = "has ended" if tail.has_ended else f"continues at event {tail.next_seq}"
            raise LogConflict(f"cannot append event {expected_seq}: the log {what}")
        tail.extend(events)

    async def settle(self) -> None:
        """Do nothing: an append to memory is never pending."""

    async def read(self, after: int, limit: int) -> tuple[Sequence[AnyEvent], bool]:
        # Every reader calls this method for each token, so the method avoids a call of Tail.read.
        # The tail of a MemoryLog never drops events.
        tail = self.tail
        if tail.gone is not None:
            raise tail.gone.with_traceback(None)
        events = tail.events[after + 1 : after + 1 + limit]
        return events, tail.has_ended and after + 1 + len(events) >= tail.next_seq


async def follow(log: Log, after: int = -1) -> AsyncIterator[AnyEvent]:
    """Yield all past and future events after number `after`, up to the terminal event."""
    has_ended = False
    while not has_ended:
        await log.wait(after)
        events, has_ended = await log.read(after, _PAGE)
        for event in events:
            yield event
        after += len(events)
        if len(events) == _PAGE:
            # Let other tasks run while a long log is read.
            await asyncio.sleep(0)
