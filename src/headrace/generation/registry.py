"""Finds streams: live streams with their writers, and finished streams in a store."""

import asyncio
import contextlib
import time
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, TypeVar

from headrace.generation.admission import QueueTicket
from headrace.generation.event_builder import to_event
from headrace.generation.readers import Audience, ReaderPause
from headrace.generation.remote import RemoteStream
from headrace.generation.stream import LiveStream
from headrace.metrics.metrics import ServerFigures
from headrace.streams.log import Log, LogConflict, LogGone, LogUnsound, MemoryLog
from headrace.streams.record import Names, Record
from headrace.streams.store import (
    ByConversation,
    ById,
    ByKey,
    Name,
    Retention,
    Store,
    Stored,
    StoreStalled,
)
from headrace.streams.stores.memory import MemoryStore
from headrace_common.errors import RequestError
from headrace_common.ids import StreamId
from headrace_common.system.race import race

_IN_MEMORY = Retention(keep_s=3600.0, max_streams=10_000, max_bytes=256 << 20)
_MAX_UNSWEPT = 64 << 20
_LATE_S = 2.0
_CUTS = {
    "cancelled": "The stream was stopped.",
    "replaced": "A newer request of this conversation replaced this stream.",
}

Result = TypeVar("Result")


class _StreamWithoutWriter:
    def __init__(self, record: Record, log: Log) -> None:
        self.record = record
        self.log = log
        self.audience = Audience(log)

    def beat(self, form: str, interval_s: float) -> None:
        """Do nothing: only a writer sends heartbeats."""

    def stop(self, error: RequestError) -> None:
        """Do nothing: only a writer can be stopped."""


class FinishedStream(_StreamWithoutWriter):
    """A stream whose log has ended; it can be read like a live stream, but not stopped."""

    state = "finished"


class SuspendedStream(_StreamWithoutWriter):
    """A stream that waits for a later engine of its model.

    It cannot be read, and only `Registry.stop` stops it.
    """

    state = "recovering"


Found = LiveStream | FinishedStream | SuspendedStream | RemoteStream


class Registry:
    """Finds streams by their names, and holds the live streams of this server."""

    def __init__(self, store: Store, figures: ServerFigures) -> None:
        self.store = store
        self.figures = figures
        # Streams that the server keeps for a while after their end, although no client opted in.
        self._kept = MemoryStore()
        # Bytes added to `_kept` and to `store` since their last sweeps.
        self._num_unswept = self._num_unswept_stored = 0
        # Set when `store` should be swept soon.
        self.is_sweep_due = asyncio.Event()
        self._live: dict[StreamId, LiveStream] = {}
        # Set when a stream is added or closed. A new event then replaces the set event.
        self._added = asyncio.Event()
        # Set once the streams of an earlier server have been claimed.
        self.has_taken_up = asyncio.Event()
        # Pauses the readers of streams that other servers write.
        self.elsewhere = ReaderPause()
        # The reasons why streams get no writer, by stream id. The key None applies to all streams.
        self._closed: dict[StreamId | None, RequestError] = {}
        # The streams that wait for a later engine, by stream id.
        self._suspended: dict[StreamId, Stored] = {}
        # Stops of streams without a writer, by stream id. The next writer of this server ends them.
        self._stops: dict[StreamId, RequestError] = {}

    def __iter__(self) -> Iterator[LiveStream]:
        return iter(list(self._live.values()))

    def __len__(self) -> int:
        return len(self._live)

    def add(self, stream: LiveStream) -> None:
        self._live[stream.record.id] = stream
        if (stop := self._stops.pop(stream.record.id, None)) is not None:
            stream.stop(stop)
        self._wake()

    def close(self, reason: RequestError, stream_id: StreamId | None = None) -> None:
        """Raise `reason` in readers that wait for a writer of this stream.

        If `stream_id` is None, raise `reason` in all readers that wait for a writer.
        """
        self._closed[stream_id] = reason
        self._wake()

    @property
    def closed(self) -> RequestError | None:
        """Return the reason why no stream gets a writer any more; None while the server runs."""
        return self._closed.get(None)

    def suspend(self, stored: Stored, reason: RequestError) -> None:
        """Raise `reason` in readers until `continues`, because the stream waits for an engine."""
        self._suspended[stored.record.id] = stored
        self.close(reason, stored.record.id)

    def continues(self, stream_id: StreamId) -> bool:
        """Let readers wait for the stream's writer again; return False if the stream was stopped.

        A stop that comes later ends the writer.
        """
        self._closed.pop(stream_id, None)
        return self._suspended.pop(stream_id, None) is not None

    def pause(self, reason: RequestError) -> None:
        """Disconnect the readers of durable streams, including streams that other servers write."""
        self.elsewhere.set(reason)
        for stream in self:
            if stream.record.is_durable:
                stream.audience.pause.set(reason)

    def unpause(self, reason: RequestError) -> None:
        self.elsewhere.clear(reason)
        for stream in self:
            stream.audience.pause.clear(reason)

    def _wake(self) -> None:
        self._added.set()
        self._added = asyncio.Event()

    def remove(self, stream: LiveStream) -> None:
        """Remove a stream, unless another writer has replaced it."""
        if self._live.get(stream.record.id) is stream:
            del self._live[stream.record.id]

    def pass_on_stop(self, stream: LiveStream) -> None:
        """Stop the next writer of a stream if this writer was stopped but cannot end the log."""
        if stream.cut is not None:
            live = self._live.get(stream.record.id)
            self._stop_writer(stream.record.id, None if live is stream else live, stream.cut)

    def _stop_writer(
        self, stream_id: StreamId, writer: LiveStream | None, error: RequestError
    ) -> None:
        if writer is not None:
            writer.stop(error)
        else:
            self._stops.setdefault(stream_id, error)

    async def find(self, owner: str, name: Name, suspended: bool = False) -> Found | None:
        """Return the stream with this name if the stream belongs to this owner, else None.

        If `suspended`, also return a stream that waits for a later engine; it cannot be read.
        Raises LogUnsound if the stream is damaged, and StoreStalled if the store does not answer.
        """
        found: Found | None = self._live.get(name.stream_id) if isinstance(name, ById) else None
        # A server that was paused for long may not be the writer any more. Then its log misses
        # events that clients have read at the server that continued the stream.
        if found is None or (
            found.record.is_durable and not self.store.surely_writes(found.record.id)
        ):
            try:
                stored = await self._kept.find(name) or await self.store.find(name)
            except LogUnsound as unsound:
                if unsound.owner not in (owner, None):
                    return None
                raise
            found = await self.wrap(stored, suspended) if stored else None
        return found if found and found.record.names.owner == owner else None

    async def find_conversations(self, owner: str, names: Sequence[str]) -> list[Found]:
        """Return the newest streams of these conversations and of conversations named
        `<name>::…`.
        """
        found: dict[StreamId, Found] = {}
        for name in names:
            # A memory store never yields to the event loop, so let other tasks run here.
            await asyncio.sleep(0)
            for stored in await self.store.find_family(ByConversation(owner, name)):
                found[stored.record.id] = await self.wrap(stored)
        return list(found.values())

    async def find_equal(self, names: Names) -> Found | None:
        """Return the stream of an equal earlier request, or None.

        With an idempotency key, return the key's stream in any state. If the client did not opt
        in to resuming, return a stream that lingers because its last reader has left. Raises
        RequestError `idempotency_key_reused` if the key belongs to a different request. If the
        key's stream is about to end with an error after which the request can be retried, raises
        that error.
        """
        if names.key is not None:
            found = await self.find(names.owner, ByKey(names.owner, names.key))
            if found is not None:
                _check_same(found.record, names)
                if isinstance(found, LiveStream) and found.cut and found.cut.kind.retry:
                    raise found.cut.with_traceback(None)
            return found
        if names.is_opted_in or not names.can_attach:
            return None
        for stream in self._live.values():
            theirs = stream.record.names
            is_same = (theirs.owner, theirs.digest) == (names.owner, names.digest)
            if is_same and stream.audience.is_lingering:
                return stream
        return None

    def end_lingering(self) -> None:
        """Abandon the streams that have no reader and that keep other requests waiting."""
        for stream in self:
            stream.audience.yield_place()

    async def put(self, record: Record, place: QueueTicket) -> Stored:
        """Store a new stream; return the new stream, or an existing stream with the same names.

        The queue ticket is closed unless the new stream is returned.
        """
        stored = None
        try:
            if record.names.is_opted_in:
                stored = await self.claim(record)
            elif record.names.is_kept:
                stored = await self.keep(record)
            else:
                stored = Stored(record, MemoryLog())
            return stored
        finally:
            if stored is None or stored.record.id != record.id:
                place.close()

    async def claim(self, record: Record) -> Stored:
        """Store a stream under its record's names. A live stream of the same conversation is
        replaced.

        If another request has just taken the idempotency key, the other request's stream is
        returned.
        """
        # A stream that is stored before the streams of an earlier server are claimed could be
        # mistaken for one of them.
        if not self.has_taken_up.is_set():
            await self.unless_stalled(record, self.has_taken_up.wait())
        replaced: Stored | None = None
        while True:
            stored = await self.store.create(record, replaced.record.id if replaced else None)
            if stored.record.id == record.id:
                self._num_unswept_stored += record.num_input_bytes
                if self._num_unswept_stored > _MAX_UNSWEPT:
                    self._num_unswept_stored = 0
                    self.is_sweep_due.set()
                if replaced is not None:
                    await self._stop_stored(replaced, cut_by("replaced"))
                return stored
            if record.names.key is not None and stored.record.names.key == record.names.key:
                _check_same(stored.record, record.names)
                return stored
            replaced = stored

    async def keep(self, record: Record) -> Stored:
        """Store a stream in memory.

        For a while after the stream's end, clients can find the stream by id.
        """
        self._num_unswept += record.num_input_bytes
        if self._num_unswept > _MAX_UNSWEPT:
            await self.sweep()
        return await self._kept.create(record)

    async def sweep(self) -> None:
        """Delete the streams in memory that have expired."""
        self._num_unswept = 0
        totals = await self._kept.sweep(_IN_MEMORY, time.time())
        self.figures.swept("memory", totals.num_bytes)

    async def discard(self, owner: str, name: Name) -> None:
        """Delete the stream with this name if the stream belongs to this owner.

        A live stream is stopped first.
        """
        try:
            found = await self.find(owner, name, suspended=True)
        except LogUnsound as unsound:
            await self.store.forget(unsound.stream_id)
            return
        if found is not None:
            await self.stop(found)
            # Streams in memory are deleted even if the disk is stalled.
            store = self.store if found.record.names.is_opted_in else self._kept
            await store.forget(found.record.id)

    async def stop(self, found: Found) -> None:
        """End a stream; return once the engine has freed the stream's memory. Idempotent.

        Raises StoreStalled if the terminal event cannot be stored now. The stream still stops,
        and the event is stored later. Raises RequestError `server_restarting` or `engine_failed` if
        another process could continue the stream.
        """
        state, asked_at = found.state, time.monotonic()
        if isinstance(found, RemoteStream):
            await self.unless_stalled(found.record, found.stop("cancelled"))
        else:
            found.stop(cut_by("cancelled"))
        if isinstance(found, LiveStream):
            await self.unless_stalled(found.record, found.ended.wait())
        if (
            isinstance(found, LiveStream | SuspendedStream)
            and not await _has_ended(found.log)
            and not await self._end_suspended(found.record.id, cut_by("cancelled"))
        ):
            # The stop holds for the next writer of this server. But another server, or this one
            # after a restart, would continue the stream.
            found.audience.pause.check()
        self.figures.stopped(state, time.monotonic() - asked_at)

    async def unless_stalled(self, record: Record, work: Coroutine[Any, Any, Result]) -> Result:
        """Return the result of `work`, which waits for the log of this record's stream.

        Raises StoreStalled if the stream is durable and the store is stalled.
        """
        if not record.is_durable:
            return await work
        async with race(work, self.store.stalled.wait()) as (working, _):
            if not working.done():
                raise StoreStalled("The server cannot store streams now; try again later.")
            result: Result = await working
            return result

    async def reach(self, found: Found, seq: int) -> int:
        """Wait up to `_LATE_S` until a stream's log has event `seq`, and return the next number.

        The wait is needed because another server can deliver an event before this server learns
        that the event is stored. Raises StoreStalled as `unless_stalled` does, and if a durable
        stream that still runs lacks the event: a failover may have lost the event, and the
        stream's writer will store it again.
        """
        log = found.log
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LATE_S):
                while (next_seq := log.next_seq) <= seq:
                    await self.unless_stalled(found.record, log.wait(next_seq - 1))
                    if log.next_seq == next_seq:
                        # The log has ended.
                        break
        if log.next_seq <= seq and found.record.is_durable and not await _has_ended(log):
            raise StoreStalled("The store may have lost events of this stream; try again later.")
        return log.next_seq

    def written_here(self, stream_id: StreamId) -> LiveStream | None:
        """Return a stream that this server writes, or None."""
        return self._live.get(stream_id)

    async def stop_here(self, stream_id: StreamId, error: RequestError) -> None:
        """Stop a stream that this server writes.

        If the stream is still opening or resuming, it ends as soon as it has a writer. A stream of
        another server, or a stream that has ended, is ignored.
        """
        if (live := self._live.get(stream_id)) is not None:
            live.stop(error)
            return
        try:
            stored = await self.store.find(ById(stream_id))
        except StoreStalled:
            self._stop_writer(stream_id, self._live.get(stream_id), error)
        except LogUnsound:
            # A damaged stream gets no writer.
            pass
        else:
            if stored is not None:
                await self._stop_stored(stored, error)

    async def _stop_stored(self, stored: Stored, error: RequestError) -> None:
        if stored.elsewhere is not None or await _has_ended(stored.log):
            return
        with contextlib.suppress(StoreStalled):
            if await self._end_suspended(stored.record.id, error):
                return
        self._stop_writer(stored.record.id, self._live.get(stored.record.id), error)

    async def _end_suspended(self, stream_id: StreamId, error: RequestError) -> bool:
        """End a stream that waits for a later engine; return False if the stream does not wait.

        If the end cannot be stored, the next writer stores the end.
        """
        # While the server ends, a stalled store must not delay the answer.
        if self.closed or (stored := self._suspended.pop(stream_id, None)) is None:
            return False
        try:
            await self.unless_stalled(stored.record, _end(stored.log, error))
        except BaseException:
            self._suspended.setdefault(stream_id, stored)
            self._stop_writer(stream_id, None, error)
            raise
        self._stops.pop(stream_id, None)
        return True

    async def wrap(self, stored: Stored, suspended: bool = False) -> Found:
        """Return a stored stream as a live, remote or finished stream.

        A stream that is still opening or resuming has no writer yet, so wait for the writer. If the
        stream counted as finished, clients could not stop it and would get no heartbeats. Raises
        RequestError if no writer will start before the server restarts. If `suspended`, return a
        stream that waits for a later engine instead.
        """
        # If the log of a live stream is behind the stored log, another server writes the stream.
        while (live := self._live.get(stored.record.id)) is None or (
            live.log.next_seq < stored.log.next_seq
        ):
            added = self._added
            if await _has_ended(stored.log):
                return FinishedStream(stored.record, stored.log)
            if stored.elsewhere is not None:
                return RemoteStream(stored, stored.elsewhere, self.elsewhere)
            closed = self._closed.get(None) or self._closed.get(stored.record.id)
            if closed is not None:
                if suspended and stored.record.id in self._suspended:
                    return SuspendedStream(stored.record, stored.log)
                raise closed.with_traceback(None)
            changed = _first(added.wait(), stored.log.wait(stored.log.next_seq - 1))
            await self.unless_stalled(stored.record, changed)
        return live


def cut_by(code: str) -> RequestError:
    """Return the error with this code, with which a stream ends early."""
    return RequestError(code, _CUTS.get(code, "The stream was ended."))


def _check_same(record: Record, names: Names) -> None:
    if record.names.digest != names.digest:
        raise RequestError(
            "idempotency_key_reused",
            "This Idempotency-Key was used for another request; send a fresh key.",
        )


async def _first(*waits: Coroutine[Any, Any, object]) -> None:
    async with race(*waits):
        pass


async def _end(log: Log, error: RequestError) -> None:
    """End a log whose last writer was cancelled, perhaps during an append."""
    await log.settle()
    with contextlib.suppress(LogConflict):
        seq = log.next_seq
        await log.append(seq, [to_event(error, seq, at_ms=0)])


async def _has_ended(log: Log) -> bool:
    try:
        _, has_ended = await log.read(log.next_seq - 1, 1)
    except (LogGone, LogUnsound):
        return True
    return has_ended
