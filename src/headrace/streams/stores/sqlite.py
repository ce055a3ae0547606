"""Streams that survive their server: rows of a SQLite database, synced before anybody reads them.

What a reader sees is decided on the event loop, after the commit; SQL runs in two threads, one
that writes and one that reads.
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
    Hear,
    Name,
    Retention,
    Stored,
    StoreStalled,
    Totals,
    Unshared,
)
from headrace.streams.stores import sqlite_rows as rows
from headrace.streams.stores.sqlite_schema import NAME, connect, open_database
from headrace.streams.stores.sqlite_writer import Writer
from headrace.streams.stores.state_dir import StateDir
from headrace.streams.stores.sweep import choose
from headrace_common.ids import StreamId

logger = logging.getLogger(__name__)

_TAIL = 32  # events of a live stream in memory: readers that keep up need no SQL
_EVICTED_AT_ONCE = 100  # appends pass between two transactions of a sweep

Result = TypeVar("Result")


class SqliteStore(Unshared):
    """Opened by `open`; `close` it before the event loop ends."""

    is_durable = True

    def __init__(self, state: StateDir, connection: sqlite3.Connection) -> None:
        self._named: set[int] = set()  # rows that the server's log has named as unsound
        self._mend(connection)
        # all live streams; any other has ended, or is not known yet
        self._live = {
            stream_id: Tail(next_seq, keep=_TAIL)
            for n, stream_id, next_seq in rows.live(connection)
            if n not in self._named
        }
        self._read_at: dict[int, float] = {}  # by row, since the last sweep
        self._state = state
        self._reader = _Reader(connect(state.path / NAME))
        self._writer = Writer(connection)
        self.stalled = self._writer.stalled
        self.writable = self._writer.writable

    @property
    def on_commit(self) -> Hear:
        return self._writer.on_commit

    @on_commit.setter
    def on_commit(self, hear: Hear) -> None:
        self._writer.on_commit = hear

    @classmethod
    def open(cls, directory: Path) -> "SqliteStore":
        """StateError says why the directory cannot be used."""
        state = StateDir(directory)
        try:
            return cls(state, open_database(state))
        except BaseException:
            state.close()
            raise

    async def close(self) -> None:
        """Commits what was appended, ends the threads, unlocks the directory."""
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
            if not isinstance(name, ByKey):  # the key is free, so that a retry can run
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
            # one was created, or has ended, during the query
        self._read_at.update((row.n, time.time()) for row in sound)
        for row in found:
            if isinstance(row, LogUnsound):
                await self._set_aside(row)
        return [self._stored(row) if isinstance(row, rows.Row) else row for row in found]

    def _mend(self, connection: sqlite3.Connection) -> None:
        """Before anybody reads: sets aside the rows that this store did not write."""
        unsound = rows.unsound(connection)
        for one in unsound:
            self._name(one)
        try:
            connection.execute("BEGIN IMMEDIATE")
            rows.set_aside(connection, unsound)
            if num_orphans := rows.drop_orphans(connection):
                logger.warning("%d logs without a stream were removed", num_orphans)
            connection.commit()
        except sqlite3.OperationalError:  # a full disk: damage is then found when it is read
            connection.rollback()

    async def _set_aside(self, unsound: LogUnsound) -> None:
        """Names a stream once and marks it as unsound, unless it is being written."""
        if unsound.row not in self._named and unsound.stream_id not in self._live:
            self._name(unsound)
            with contextlib.suppress(StoreStalled):
                await self._writer.write(partial(rows.set_aside, unsound=[unsound]), _nothing)

    def _name(self, unsound: LogUnsound) -> None:
        self._named.add(unsound.row)
        if unsound.reason:
            logger.warning(
                "The stream in row %d is set aside: %s",
                *(unsound.row, unsound.reason),
            )

    def _claimed(self, found: list[rows.Row | LogUnsound]) -> list[Stored]:
        for row in found:
            if isinstance(row, LogUnsound):
                self._name(row)
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
            assert row.has_ended, "a live stream has its tail"
            tail = Tail(row.next_seq, has_ended=True)
        return Stored(row.record, _StoredLog(self, row, tail))

    async def _delete(self, stream_ids: list[StreamId]) -> None:
        def deleted(_: None) -> None:
            for stream_id in stream_ids:
                if (tail := self._live.pop(stream_id, None)) is not None:
                    tail.forget()

        await self._writer.write(partial(rows.delete, stream_ids=stream_ids), deleted)


class _StoredLog:
    """A stream's log as the writer of one epoch, or a reader, holds it."""

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
        await self._store._writer.write(_nothing, _nothing, num_bytes=0)  # writes keep their order

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
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, work, self._connection)
        except sqlite3.Error as error:
            raise StoreStalled(
                "The server cannot read its stored streams now; try again later."
            ) from error

    async def close(self) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self._connection.close)
        self._thread.shutdown()


def _nothing(_: object) -> None:
    """The `publish` of writes that change nothing in memory; the work of those that only wait."""
