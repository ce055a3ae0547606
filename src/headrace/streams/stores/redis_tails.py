"""Keeps the newest events of the live streams that this gateway writes or follows."""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from headrace.streams.events import AnyEvent, is_terminal
from headrace.streams.log import LogUnsound, Tail
from headrace.streams.store import StoreStalled
from headrace.streams.stores import redis_scripts as scripts
from headrace.streams.stores.redis_feed import Feed
from headrace.streams.stores.redis_link import Link
from headrace.streams.stores.redis_rows import UNREADABLE, RedisRow, events_of
from headrace_common.ids import StreamId
from headrace_common.system.race import race

logger = logging.getLogger(__name__)

# The number of a live stream's newest events that stay in memory. Readers that keep up need no
# query to Redis.
_TAIL = 32
_PAGE = 256


class LiveTails:
    """Keeps a tail for each live stream; `run` is its task.

    `on_ask` is called with the words of each request from another gateway. `on_joined` is called
    each time the channel of these requests has been joined, because earlier requests were missed.
    """

    def __init__(
        self,
        link: Link,
        on_ask: Callable[[list[str]], None],
        on_joined: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        # The streams that this gateway writes, with the epoch of its newest writer.
        self.own: dict[StreamId, int] = {}
        self._link = link
        self._on_ask = on_ask
        self._on_joined = on_joined
        self._tails: dict[StreamId, Tail] = {}
        self._feed = Feed(link, link.key("ask"), self._receive, self._joined)
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        await self._feed.run()

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()

    def of(self, id: StreamId) -> Tail:
        """Return the tail of a stream that this gateway writes."""
        return self._tails[id]

    def create(self, id: StreamId, epoch: int) -> Tail:
        """Add the tail of a new stream."""
        self.own[id] = epoch
        tail = self._tails[id] = Tail(keep=_TAIL)
        return tail

    async def adopt(self, row: RedisRow) -> Tail:
        """Take over a stream as its writer, and return its tail.

        The stream's readers keep the same tail.
        """
        id = row.stream_id
        self.own[id] = row.epoch
        tail = self._tails.setdefault(id, Tail(row.next_seq, keep=_TAIL))
        self._feed.leave(self._channel(id))
        if tail.next_seq < row.next_seq:
            await self._catch_up(id)
        return tail

    async def follow(self, row: RedisRow) -> Tail:
        """Return the tail of a stream that another gateway writes.

        The tail reaches at least as far as `row`. Raises StoreStalled if the server does not
        answer.
        """
        id = row.stream_id
        is_new = id not in self._tails
        tail = self._tails.setdefault(id, Tail(row.next_seq, keep=_TAIL))
        await self._unless_stalled(self._feed.join(self._channel(id)))
        if is_new or tail.next_seq < row.next_seq:
            await self._catch_up(id)
        return tail

    def lose(self, id: StreamId, epoch: int) -> None:
        """Record that the writer of this epoch has lost its stream.

        If another gateway writes the stream now, the readers of the tail follow that gateway.
        """
        if self.own.get(id) == epoch:
            del self.own[id]
            if id in self._tails:
                self.spawn(self._feed.join(self._channel(id)))

    def recent(self, id: StreamId, first: int, end: int) -> list[AnyEvent] | None:
        """Return the events from number `first` to `end`, or None if a tail has dropped some."""
        tail = self._tails.get(id)
        events = tail.read(first - 1, end - first) if tail and not tail.gone else None
        return events if events is not None and len(events) == end - first else None

    def extend(self, id: StreamId, events: list[AnyEvent]) -> bool:
        """Append new events to a tail; return False if an earlier event is missing."""
        tail = self._tails.get(id)
        if tail is None:
            return True
        if events[0].seq > tail.next_seq:
            return False
        if new := events[tail.next_seq - events[0].seq :]:
            tail.extend(new)
        elif is_terminal(events[-1]) and not tail.has_ended:
            # The store has lost events that readers of this tail have seen.
            self._drop(id)
            tail.forget(LogUnsound(-1, id, "its last events were lost"))
            return True
        if tail.has_ended:
            self._drop(id)
        return True

    def gone(self, id: StreamId) -> None:
        """Drop a deleted stream."""
        if (tail := self._drop(id)) is not None:
            tail.forget()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a task that nobody awaits."""
        task = asyncio.create_task(work, name="redis")
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("A task that follows streams in Redis failed", exc_info=error)

    def _drop(self, id: StreamId) -> Tail | None:
        self.own.pop(id, None)
        self._feed.leave(self._channel(id))
        return self._tails.pop(id, None)

    def _channel(self, id: StreamId) -> str:
        return self._link.key(f"t:{id}")

    def _receive(self, channel: str, message: bytes) -> None:
        """Handle a published message, perhaps from a gateway of another version."""
        name = channel.removeprefix(self._link.prefix)
        id = StreamId(name.removeprefix("t:"))
        try:
            if name == "ask":
                self._on_ask(message.decode().split(" "))
            elif message == b"gone":
                self.gone(id)
            elif id not in self.own and not self.extend(id, events_of(message.partition(b" ")[2])):
                self.spawn(self._catch_up(id))
        # Only this stream has failed, not all streams that are followed.
        except (*UNREADABLE, LookupError):
            self._give_up(id)

    def _give_up(self, id: StreamId) -> None:
        """Report to the readers and to the server's log that a stream cannot be read."""
        logger.exception("A message from another gateway could not be read")
        if (tail := self._drop(id)) is not None:
            tail.forget(LogUnsound(-1, id, "its events cannot be read"))

    def _joined(self, channel: str) -> None:
        """Catch up on messages that were published before the channel was joined."""
        name = channel.removeprefix(self._link.prefix)
        if name == "ask":
            self.spawn(self._on_joined())
        else:
            self.spawn(self._catch_up(StreamId(name.removeprefix("t:"))))

    async def _catch_up(self, id: StreamId) -> None:
        """Read the stored events that were not received as messages."""
        next_seq = -1
        while (tail := self._tails.get(id)) is not None and tail.next_seq != next_seq:
            next_seq = tail.next_seq
            answer = await self._link.run(scripts.READ, id, next_seq - 1, _PAGE, is_patient=True)
            if answer is None:
                self.gone(id)
                return
            try:
                for _, fields in answer[2]:
                    self.extend(id, events_of(fields[1]))
            except UNREADABLE:
                self._give_up(id)

    async def _unless_stalled(self, work: Coroutine[Any, Any, None]) -> None:
        async with race(work, self._link.stalled.wait()) as (working, _):
            if not working.done():
                raise StoreStalled("The server cannot follow this stream now; try again later.")
            await working
