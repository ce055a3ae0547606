"""Stores streams in a SQLite database. Readers see an event only once it is synced.

SQL runs in two threads: one writes and one reads. After a commit, the event loop makes the new
events visible to readers.
"""

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from headrace.streams.events import AnyEvent
from headrace.streams.log import LogUnsound, Tail
from headrace.streams.record import Record
from headrace.streams.store import (
    ByConversation,
    ByKey,
    Name,
    OnCommit,
    Retention,
    Stored,
    StoreStalled,
    Totals,
    Unshared,
    ignore,
)
from headrace.streams.stores import sqlite_rows as rows
from headrace.streams.stores.sqlite_schema import NAME, connect, open_database
from headrace.streams.stores.sqlite_writer import STALL_S, Writer
from headrace.streams.stores.state_dir import StateDir
from headrace.streams.stores.sweep import choose
from headrace_common.ids import StreamId
from headrace_common.system import awake

logger = logging.getLogger(__name__)

# The number of a live stream's newest events that stay in memory. Readers that keep up need no SQL.
_TAIL = 32
# The number of streams that a sweep deletes in one transaction. Appends can run between two
# transactions.
_EVICTED_AT_ONCE = 100

Result = TypeVar("Result")


class SqliteStore(Unshared):
    """The store in SQLite.

    Create the store with `open`, and call `close` before the event loop ends.
    """

    is_durable = True

    def __init__(
        self, state: StateDir, connection: sqlite3.Connection, on_commit: OnCommit
    ) -> None:
        # Rows that the server's log has already reported as damaged.
        self._reported: set[int] = set()
        self._set_aside_altered(connection)
        # The tails of all live streams. A stream without a tail has ended or is not known yet.
        self._live = {
            stream_id: Tail(next_seq, keep=_TAIL)
            for n, stream_id, next_seq in rows.live(connection)
            if n not in self._reported
        }
        # Unix seconds at which each row was last read, collected since the last sweep.
        self._read_at: dict[int, float] = {}
        self._state = state
        self._reader = _Reader(connect(state.path / NAME))
        self._writer = Writer(connection, on_commit)
        self.stalled = self._writer.stalled
        self.writable = self._writer.writable

    @classmethod
    def open(cls, directory: Path, on_commit: OnCommit = ignore) -> "SqliteStore":
        """Open the store. Raises StateError if the directory cannot be used."""
        state = StateDir(directory)
        try:
            return cls(state, open_database(state), on_commit)
        except BaseException:
            state.close()
            raise

    async def close(self) -> None:
        """Commit all appends, end the threads and unlock the directory."""
        await self._reader.close()
        await self._writer.close()
        self._state.close()

    async def create(self, record: Record, replaces: StreamId | None = None) -> Stored:
        return await self._writer.write(
            partial(rows.claim, record=record, replaces=replaces), self._created
        )

    async def find(self, name: Name) -> Stored | None:
        for found in await self._ask(partial(rows.find_all, name=name)):
            if isinstance(found, Stored):
                return found
            # A damaged stream frees its key, so that a retry can run.
            if not isinstance(name, ByKey):
                raise found
        return None

    async def find_family(self, name: ByConversation) -> list[Stored]:
        found = await self._ask(partial(rows.find_family, name=name))
        return [stored for stored in found if isinstance(stored, Stored)]

    async def forget(self, stream_id: StreamId) -> None:
        await self._delete([stream_id])

    async def unfinished(self) -> list[Stored]:
        return await self._writer.write(rows.claim_unfinished, self._claimed)

    async def sweep(self, retention: Retention, now: float) -> Totals:
        read_at, self._read_at = self._read_at, {}
        await self._writer.write(partial(rows.touch, read_at=read_at), _nothing)
        evicted, totals = choose(await self._reader.run(rows.kept), retention, now)
        for start in range(0, len(evicted), _EVICTED_AT_ONCE):
            await self._delete(evicted[start : start + _EVICTED_AT_ONCE])
        return totals

    async def _ask(
        self, query: Callable[[sqlite3.Connection], list[rows.Row | LogUnsound]]
    ) -> list[Stored | LogUnsound]:
        while True:
            found = await self._reader.run(query)
            sound = [row for row in found if isinstance(row, rows.Row)]
            if all(row.has_ended or row.record.id in self._live for row in sound):
                break
            # Repeat the query, because a stream was created or has ended meanwhile.
        self._read_at.update((row.n, time.time()) for row in sound)
        for row in found:
            if isinstance(row, LogUnsound):
                await self._set_aside(row)
        return [self._stored(row) if isinstance(row, rows.Row) else row for row in found]

    def _set_aside_altered(self, connection: sqlite3.Connection) -> None:
        """Set aside rows that were altered outside this store, before a reader can see these
        rows.
        """
        unsound = rows.unsound(connection)
        for one in unsound:
            self._report(one)
        try:
            connection.execute("BEGIN IMMEDIATE")
            rows.set_aside(connection, unsound)
            if num_orphans := rows.drop_orphans(connection):
                logger.warning("%d logs without a stream were removed", num_orphans)
            connection.commit()
        # If the disk is full, the damage is found later, when the stream is read.
        except sqlite3.OperationalError:
            connection.rollback()

    async def _set_aside(self, unsound: LogUnsound) -> None:
        """Report a damaged stream once, and mark the stream as damaged unless it is live."""
        if unsound.row not in self._reported and unsound.stream_id not in self._live:
            self._report(unsound)
            with contextlib.suppress(StoreStalled):
                await self._writer.write(partial(rows.set_aside, unsound=[unsound]), _nothing)

    def _report(self, unsound: LogUnsound) -> None:
        self._reported.add(unsound.row)
        if unsound.reason:
            logger.warning(
                "The stream in row %d is damaged and was ended: %s",
                *(unsound.row, unsound.reason),
            )

    def _claimed(self, found: list[rows.Row | LogUnsound]) -> list[Stored]:
        for row in found:
            if isinstance(row, LogUnsound):
                self._report(row)
                if (tail := self._live.pop(row.stream_id, None)) is not None:
                    tail.forget(row)
        return [self._stored(row) for row in found if isinstance(row, rows.Row)]

    def _created(self, row: rows.Row) -> Stored:
        if row.epoch != rows.NO_WRITER:
            self._live[row.record.id] = Tail(keep=_TAIL)
        return self._stored(row)

    def _stored(self, row: rows.Row) -> Stored:
        stream_id = row.record.id
        tail = self._live.get(stream_id)
        if tail is None:
            assert row.has_ended, "a live stream has no tail"
            tail = Tail(row.next_seq, has_ended=True)
        return Stored(row.record, _StoredLog(self, row, tail))

    async def _delete(self, stream_ids: list[StreamId]) -> None:
        def deleted(_: None) -> None:
            for stream_id in stream_ids:
                if (tail := self._live.pop(stream_id, None)) is not None:
                    tail.forget()

        await self._writer.write(partial(rows.delete, stream_ids=stream_ids), deleted)


class _StoredLog:
    """Gives a reader or writer access to a stream's log. Each new writer gets a higher epoch."""

    __slots__ = ("_row", "_store", "_tail")

    def __init__(self, store: SqliteStore, row: rows.Row, tail: Tail) -> None:
        self._store = store
        self._row = row
        self._tail = tail

    @property
    def next_seq(self) -> int:
        return self._tail.next_seq

    async def append(self, expected_seq: int, events: Sequence[AnyEvent]) -> None:
        if not events:
            return
        batch = rows.make_batch(expected_seq, events)
        work = partial(rows.append, n=self._row.n, epoch=self._row.epoch, batch=batch)
        publish = partial(self._appended, events)
        await self._store._writer.write(work, publish, num_bytes=len(batch.data))

    async def settle(self) -> None:
        # Writes keep their order, so this empty write completes after all earlier writes.
        await self._store._writer.write(_nothing, _nothing, num_bytes=0)

    async def read(self, after: int, limit: int) -> tuple[Sequence[AnyEvent], bool]:
        self._store._read_at[self._row.n] = time.time()
        events = self._tail.read(after, limit)
        if events is None:
            num = min(limit, self._tail.next_seq - after - 1)
            work = partial(rows.read, row=self._row, after=after, num=num)
            try:
                events = await self._store._reader.run(work)
            except LogUnsound as unsound:
                await self._store._set_aside(unsound)
                raise
        return events, self._tail.ends_with(after + len(events))

    async def wait(self, after: int) -> None:
        await self._tail.wait(after)

    def _appended(self, events: Sequence[AnyEvent], _: None) -> None:
        self._tail.extend(events)
        if self._tail.has_ended:
            del self._store._live[self._row.record.id]


class _Reader:
    """The thread that reads, with a connection that cannot write."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        connection.execute("PRAGMA query_only = ON")
        self._connection = connection
        self._thread = ThreadPoolExecutor(1, "stream-reader")

    async def run(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        """Return the result of `work`. Raises StoreStalled if the disk fails or does not answer.

        A client that waits for the disk gets no byte, so the wait has the limit of a commit.
        """
        loop = asyncio.get_running_loop()
        try:
            async with awake.within(STALL_S):
                return await loop.run_in_executor(self._thread, work, self._connection)
        except (sqlite3.Error, TimeoutError) as error:
            raise StoreStalled(
                "The server cannot read its stored streams now; try again later."
            ) from error

    async def close(self) -> None:
        """Close the connection, unless the disk does not answer."""
        loop = asyncio.get_running_loop()
        closing = loop.run_in_executor(self._thread, self._connection.close)
        await asyncio.wait([closing], timeout=STALL_S)
        self._thread.shutdown(wait=False)


def _nothing(_: object) -> None:
    """Do nothing.

    This is the `publish` of writes that change nothing in memory, and the `work` of `settle`.
    """
