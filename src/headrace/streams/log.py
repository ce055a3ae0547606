"""The event log of one stream: one writer, many readers, a cursor each."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from headrace.streams.events import AnyEvent, is_terminal

_PAGE = 256


class Log(Protocol):
    """What writer and readers share; the store decides what durable means."""

    async def append(self, expected_seq: int, events: Sequence[AnyEvent]) -> None:
        """Returns when the events are durable; only then can a reader see them.

        Raises LogConflict if the first event is not number `expected_seq`, or after the end.
        """

    async def read(self, after: int, limit: int) -> tuple[Sequence[AnyEvent], bool]:
        """Events that follow number `after`, and whether the last of them is the last of all."""

    async def wait(self, after: int) -> None:
        """Returns once an event that follows number `after` can be read."""


class LogConflict(Exception):
    """An append that does not continue the log; a bug of its writer."""


class MemoryLog:
    """A log that lives as long as the process."""

    def __init__(self) -> None:
        self._events: list[AnyEvent] = []
        self._waiting: set[asyncio.Future[None]] = set()

    async def append(self, expected_seq: int, events: Sequence[AnyEvent]) -> None:
        if expected_seq != len(self._events) or self._has_ended:
            raise LogConflict(f"append at {expected_seq} to a log of {len(self._events)}")
        self._events.extend(events)
        for future in self._waiting:
            if not future.done():
                future.set_result(None)
        self._waiting.clear()

    async def read(self, after: int, limit: int) -> tuple[Sequence[AnyEvent], bool]:
        events = self._events[after + 1 : after + 1 + limit]
        return events, bool(events) and is_terminal(events[-1])

    async def wait(self, after: int) -> None:
        if after + 1 < len(self._events):
            return
        future = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        try:
            await future
        finally:
            self._waiting.discard(future)

    @property
    def _has_ended(self) -> bool:
        return bool(self._events) and is_terminal(self._events[-1])


async def follow(log: Log, after: int = -1) -> AsyncIterator[AnyEvent]:
    """Every event after the cursor, those to come included, up to the terminal one."""
    has_ended = False
    while not has_ended:
        await log.wait(after)
        events, has_ended = await log.read(after, _PAGE)
        for event in events:
            yield event
        after = events[-1].seq
