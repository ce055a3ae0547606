"""Tests properties that only the SQLite store has: restarts, threads, order of commits."""

import asyncio
import contextlib
import logging
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.streams.log import LogConflict
from headrace.streams.store import ByConversation, ById, Retention, StoreStalled
from headrace.streams.stores import sqlite as sqlite_store
from headrace.streams.stores.sqlite import SqliteStore
from headrace.streams.stores.sqlite_schema import NAME
from headrace.streams.stores.state_dir import StateInUse
from tools.harness.eventually import settle
from tools.harness.stream_events import (
    A,
    B,
    everything,
    finish,
    make_record,
    opened_sqlite,
    some,
    tokens,
)


async def test_the_next_server_finds_all_streams_again(tmp_path: Path) -> None:
    async with opened_sqlite(tmp_path) as store:
        live = await store.create(make_record("a", conversation="chat"))
        await live.log.append(0, some(300))
        ended = await store.create(make_record("b"))
        await ended.log.append(0, [finish(0)])
    async with opened_sqlite(tmp_path) as store:
        (live,) = await store.unfinished()
        assert (live.record.id, live.log.next_seq) == (A, 300)
        await live.log.append(300, [finish(300)])
        found = await store.find(ByConversation("", "chat"))
        assert found and await everything(found.log) == [*some(300), finish(300)]
        ended = await store.find(ById(B))
        assert ended and await everything(ended.log) == [finish(0)]


async def test_a_writer_from_before_a_restart_is_refused(tmp_path: Path) -> None:
    async with opened_sqlite(tmp_path) as store:
        for _ in range(3):
            old = (await store.unfinished() or [await store.create(make_record())])[0]
        await store.unfinished()
        with pytest.raises(LogConflict):
            await old.log.append(0, some(1))


async def test_a_second_store_in_the_same_directory_is_refused(tmp_path: Path) -> None:
    async with opened_sqlite(tmp_path) as store:
        with pytest.raises(StateInUse):
            SqliteStore.open(tmp_path)
    async with opened_sqlite(tmp_path) as store:
        await store.forget(A)


async def test_a_failed_open_frees_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(sqlite_store, "open_database", lambda state: 1 / 0)
        SqliteStore.open(tmp_path)
    async with opened_sqlite(tmp_path) as store:
        await store.forget(A)


def test_a_closed_store_leaves_one_file_and_accepts_no_writes(tmp_path: Path) -> None:
    async def run(store: SqliteStore) -> None:
        log = (await store.create(make_record())).log
        appends = [asyncio.create_task(log.append(seq, some(1, seq))) for seq in range(5)]
        await settle()
        await store.close()
        await asyncio.gather(*appends)
        with pytest.raises(StoreStalled):
            await log.append(5, some(1, 5))

    asyncio.run(_opened(run, tmp_path))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["lock", NAME]


async def _opened(run: Callable[[SqliteStore], Any], directory: Path) -> None:
    await run(SqliteStore.open(directory))


async def test_old_events_are_read_while_new_ones_are_written(tmp_path: Path) -> None:
    async with opened_sqlite(tmp_path) as store:
        log = (await store.create(make_record())).log
        await log.append(0, some(1000))
        reader = asyncio.create_task(everything(log))
        for seq in range(1000, 1020):
            await log.append(seq, some(1, seq))
        await log.append(1020, [finish(1020)])
        assert await reader == [*some(1020), finish(1020)]


async def test_a_live_stream_keeps_few_events_in_memory(tmp_path: Path) -> None:
    async with opened_sqlite(tmp_path) as store:
        log = (await store.create(make_record())).log
        for first in range(0, 1000, 50):
            await log.append(first, some(50, first))
        assert len(store._live[A].events) < 2 * sqlite_store._TAIL + 50
        await log.append(1000, [finish(1000)])
        assert not store._live


async def test_a_stream_that_ends_while_it_is_looked_up_is_found_whole(tmp_path: Path) -> None:
    async with opened_sqlite(tmp_path) as store:
        log = (await store.create(make_record())).log
        query = store._reader.run

        async def query_then_end(work: Callable[[sqlite3.Connection], Any]) -> Any:
            row = await query(work)
            if not log.next_seq:
                await log.append(0, [finish(0)])
            return row

        store._reader.run = query_then_end  # type: ignore[method-assign]
        found = await store.find(ById(A))
        assert found and await everything(found.log) == [finish(0)]


async def test_invalid_unicode_is_refused_without_stopping_the_store(tmp_path: Path) -> None:
    async with opened_sqlite(tmp_path) as store:
        log = (await store.create(make_record())).log
        with pytest.raises(UnicodeEncodeError):
            await log.append(0, [tokens(0, "\ud800")])
        await log.append(0, [finish(0)])


async def test_a_live_stream_with_a_damaged_record_is_ended_at_startup(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened_sqlite(tmp_path) as store:
        for name in "ab":
            await (await store.create(make_record(name))).log.append(0, some(1))
    with contextlib.closing(sqlite3.connect(tmp_path / NAME)) as other, other:
        other.execute("UPDATE records SET record = x'80' WHERE n = 1")
    with caplog.at_level(logging.WARNING):
        async with opened_sqlite(tmp_path) as store:
            assert [stored.record.id for stored in await store.unfinished()] == [B]
            totals = await store.sweep(Retention(), 0)
            assert (totals.num_live, totals.num_streams) == (1, 2)
    assert "row 1 is damaged and was ended: its record" in caplog.text


async def test_an_unreadable_database_counts_as_a_stalled_store(tmp_path: Path) -> None:
    async with opened_sqlite(tmp_path) as store:
        with contextlib.closing(sqlite3.connect(tmp_path / NAME)) as other:
            other.execute("DROP TABLE records")
        with pytest.raises(StoreStalled):
            await store.find(ById(A))


async def test_a_hanging_disk_delays_neither_clients_nor_the_shutdown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_store, "STALL_S", 0.2)
    answers = threading.Event()
    store = SqliteStore.open(tmp_path)
    try:
        reading = asyncio.create_task(store._reader.run(lambda _: answers.wait(30)))
        await settle()
        with pytest.raises(StoreStalled):
            await store.find(ById(A))
        with pytest.raises(StoreStalled):
            await reading
        async with asyncio.timeout(10):
            await store.close()
    finally:
        answers.set()


async def test_a_sweep_deletes_any_number_of_streams(tmp_path: Path) -> None:
    async with opened_sqlite(tmp_path) as store:
        names = [str(number) for number in range(250)]
        created = await asyncio.gather(*(store.create(make_record(name)) for name in names))
        await asyncio.gather(*(stored.log.append(0, [finish(0)]) for stored in created))
        assert (await store.sweep(Retention(max_streams=10), 0)).num_streams == 10
        assert (await store.sweep(Retention(), 0)).num_streams == 10
