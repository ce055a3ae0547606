"""Tests the writer thread: commits, stalls and failed writes."""

import asyncio
import logging
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from headrace.streams.log import LogConflict
from headrace.streams.store import ById, StoreStalled
from headrace.streams.stores import sqlite_writer
from headrace.streams.stores.sqlite import SqliteStore
from tools.harness.eventually import eventually, settle
from tools.harness.stream_events import (
    A,
    B,
    everything,
    finish,
    locked,
    make_record,
    opened_sqlite,
    some,
)


class HeldConnection:
    """A connection that counts its commits and holds them until `gate` is set."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.gate = threading.Event()
        self.reached = threading.Event()
        self.num_commits = 0
        self.num_failures = 0  # commits still to fail
        self._connection = connection
        self.execute, self.executemany = connection.execute, connection.executemany
        self.rollback, self.close = connection.rollback, connection.close

    def commit(self) -> None:
        self.reached.set()
        self.gate.wait()
        if self.num_failures:
            self.num_failures -= 1
            raise sqlite3.OperationalError("disk I/O error")
        self._connection.commit()
        self.num_commits += 1


def hold_commits(store: SqliteStore) -> HeldConnection:
    held = HeldConnection(store._writer._connection)
    store._writer._connection = held  # type: ignore[assignment]
    return held


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite_writer, "RETRY_S", 0.01)


async def test_an_append_is_invisible_until_its_commit_returns(tmp_path: Path) -> None:
    async with opened_sqlite(tmp_path) as store:
        log = (await store.create(make_record())).log
        waiting = asyncio.create_task(log.wait(-1))
        held = hold_commits(store)
        append = asyncio.create_task(log.append(0, some(1)))
        await asyncio.to_thread(held.reached.wait)
        found = await store.find(ById(A))
        assert found and found.log.next_seq == 0
        assert await found.log.read(-1, 10) == ([], False)
        assert not append.done() and not waiting.done()
        held.gate.set()
        await append
        await waiting
        assert await found.log.read(-1, 10) == (some(1), False)


async def test_appends_that_arrive_together_share_a_commit(tmp_path: Path) -> None:
    async with opened_sqlite(tmp_path) as store:
        logs = [(await store.create(make_record(str(n)))).log for n in range(20)]
        held = hold_commits(store)
        held.gate.set()
        await asyncio.gather(*(log.append(0, some(1)) for log in logs))
        assert held.num_commits == 1


async def test_an_append_that_arrives_slightly_later_shares_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened_sqlite(tmp_path) as store:
        log = (await store.create(make_record())).log
        held = hold_commits(store)
        held.gate.set()
        monkeypatch.setattr(sqlite_writer, "GROUP_S", 0.5)
        first = asyncio.create_task(log.append(0, some(1)))
        await settle()
        await asyncio.to_thread(eventually, store._writer._writes.empty)  # the thread has it
        await log.append(1, [finish(1)])
        assert first.done() and held.num_commits == 1


async def test_a_failed_commit_is_repeated_as_a_whole(tmp_path: Path) -> None:
    async with opened_sqlite(tmp_path) as store:
        log = (await store.create(make_record())).log
        held = hold_commits(store)
        held.num_failures = 3
        held.gate.set()
        await asyncio.gather(log.append(0, some(2)), log.append(2, [finish(2)]))
        found = await store.find(ById(A))
        assert found and await everything(found.log) == [*some(2), finish(2)]


async def test_appends_wait_for_a_failing_database_without_loss_or_duplicates(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        async with opened_sqlite(tmp_path) as store:
            log = (await store.create(make_record())).log
            with locked(tmp_path):
                appends = [asyncio.create_task(log.append(seq, some(1, seq))) for seq in range(3)]
                await store.stalled.wait()
                appends.append(asyncio.create_task(log.append(3, [finish(3)])))
                await settle()
                assert not any(append.done() for append in appends)
                assert not store.writable.is_set()
            await store.writable.wait()
            await asyncio.gather(*appends)
            assert not store.stalled.is_set()
            found = await store.find(ById(A))
            assert found and await everything(found.log) == [*some(3), finish(3)]
    said = [record.message for record in caplog.records]
    assert said == [
        "The stream store cannot write: database is locked",
        "The stream store can write again",
    ]


async def test_new_streams_are_refused_while_the_store_is_stalled(tmp_path: Path) -> None:
    async with opened_sqlite(tmp_path) as store:
        with locked(tmp_path):
            for name in "ab":
                with pytest.raises(StoreStalled):
                    await store.create(make_record(name))
        await store.writable.wait()
        assert (await store.create(make_record("a"))).log.next_seq == 0


async def test_a_slow_commit_counts_as_a_stall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_writer, "STALL_S", 0.05)

    async with opened_sqlite(tmp_path) as store:
        log = (await store.create(make_record())).log
        held = hold_commits(store)
        append = asyncio.create_task(log.append(0, some(1)))
        await asyncio.to_thread(held.reached.wait)
        later = asyncio.create_task(log.append(1, [finish(1)]))
        await store.stalled.wait()
        assert not append.done()
        held.gate.set()
        await store.writable.wait()
        await asyncio.gather(append, later)


async def test_the_buffer_of_waiting_writes_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_writer, "MAX_WAITING_BYTES", 1000)

    async with opened_sqlite(tmp_path) as store:
        log = (await store.create(make_record())).log
        with locked(tmp_path):
            append = asyncio.create_task(log.append(0, some(100)))  # alone, any size is taken
            await store.stalled.wait()
            with pytest.raises(StoreStalled, match="1000"):
                await log.append(100, some(1, 100))
        await append
        await log.append(100, [finish(100)])
        assert await everything(log) == [*some(100), finish(100)]


async def test_a_write_that_can_never_succeed_fails_alone(tmp_path: Path) -> None:
    async with opened_sqlite(tmp_path) as store:
        log = (await store.create(make_record())).log
        outcomes = await asyncio.gather(
            log.append(0, some(1)),
            store._writer.write(lambda db: db.execute("DELETE FROM streams") and 1 / 0, print),
            log.append(7, some(1, 7)),
            log.append(1, [finish(1)]),
            return_exceptions=True,
        )
        assert [type(outcome) for outcome in outcomes] == [
            type(None),
            ZeroDivisionError,
            LogConflict,
            type(None),
        ]
        assert await everything(log) == [*some(1), finish(1)]


async def test_an_append_is_written_even_if_its_caller_is_cancelled(tmp_path: Path) -> None:
    async with opened_sqlite(tmp_path) as store:
        log = (await store.create(make_record())).log
        held = hold_commits(store)
        seqs = (0, 7, 1)
        appends = [asyncio.create_task(log.append(seq, some(1, seq))) for seq in seqs]
        await asyncio.to_thread(held.reached.wait)
        for append in appends[:2]:
            append.cancel()
        held.gate.set()
        await appends[2]
        await log.append(2, [finish(2)])
        assert await everything(log) == [*some(2), finish(2)]


async def test_closing_a_stalled_store_fails_the_waiting_appends(tmp_path: Path) -> None:
    store = SqliteStore.open(tmp_path)
    log = (await store.create(make_record())).log
    with locked(tmp_path):
        appends = [asyncio.create_task(log.append(0, some(1)))]
        await store.stalled.wait()
        appends.append(asyncio.create_task(log.append(1, some(1, 1))))
        await settle()
        await store.close()
        failed = await asyncio.gather(*appends, return_exceptions=True)
    assert [type(failure) for failure in failed] == [StoreStalled] * 2
    async with opened_sqlite(tmp_path) as store:
        await store.forget(A)


async def test_time_when_the_event_loop_is_blocked_does_not_count_as_a_stall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_writer, "STALL_S", 0.2)

    async with opened_sqlite(tmp_path) as store:
        log = (await store.create(make_record())).log
        held = hold_commits(store)
        append = asyncio.create_task(log.append(0, some(1)))
        await asyncio.to_thread(held.reached.wait)
        time.sleep(0.3)  # noqa: ASYNC251
        await settle()
        assert not store.stalled.is_set()
        held.gate.set()
        await append


async def test_a_hanging_disk_does_not_block_the_shutdown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_writer, "STALL_S", 0.05)

    store = SqliteStore.open(tmp_path)
    log = (await store.create(make_record())).log
    held = hold_commits(store)
    append = asyncio.create_task(log.append(0, some(1)))
    await asyncio.to_thread(held.reached.wait)
    await store.close()
    assert not append.done()
    held.gate.set()
    await append
    store._writer._thread.join()


async def test_a_stalled_store_gets_no_extra_time_at_shutdown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_writer, "STALL_S", 0.05)

    store = SqliteStore.open(tmp_path)
    log = (await store.create(make_record())).log
    held = hold_commits(store)
    appending = asyncio.create_task(log.append(0, some(1)))
    await store.stalled.wait()
    monkeypatch.setattr(sqlite_writer, "STALL_S", 600.0)
    async with asyncio.timeout(60):
        await store.close()
    assert not appending.done()
    held.gate.set()
    await appending
    store._writer._thread.join()


async def test_a_full_database_continues_once_it_may_grow(tmp_path: Path) -> None:
    async with opened_sqlite(tmp_path) as store:
        log = (await store.create(make_record())).log
        connection = store._writer._connection
        used = connection.execute("PRAGMA page_count").fetchone()[0]
        connection.execute(f"PRAGMA max_page_count = {used + 2}")
        appends = [asyncio.create_task(log.append(n * 100, some(100, n * 100))) for n in range(20)]
        await store.stalled.wait()
        with pytest.raises(StoreStalled):
            await store.create(make_record("b"))
        connection.execute("PRAGMA max_page_count = 1000000")
        await asyncio.gather(*appends)
        await log.append(2000, [finish(2000)])
        found = await store.find(ById(A))
        assert found and await everything(found.log) == [*some(2000), finish(2000)]
        assert await store.find(ById(B)) is None


def run_program(name: str, directory: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", f"tests.streams.stores.{name}", str(directory)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


async def test_a_full_disk_loses_no_events(tmp_path: Path) -> None:
    assert run_program("full_disk", tmp_path).communicate()[0].split() == ["stalled", "written"]

    async with opened_sqlite(tmp_path) as store:
        found = await store.find(ById(A))
        assert found and await everything(found.log) == [*some(2000), finish(2000)]


@pytest.mark.parametrize("num_told", [1, 40, 200])
async def test_an_event_survives_a_kill_once_its_append_returned(
    tmp_path: Path, num_told: int
) -> None:
    server = run_program("appender", tmp_path)
    assert server.stdout
    for _ in range(num_told):
        next_seq = int(server.stdout.readline())
    server.kill()
    next_seq = int(([next_seq, *server.communicate()[0].split("\n")[:-1]])[-1])

    async with opened_sqlite(tmp_path) as store:
        (stored,) = await store.unfinished()
        events, _ = await stored.log.read(-1, 1 << 20)
        assert stored.log.next_seq == len(events) >= next_seq
        assert events == some(len(events))


async def test_a_write_whose_callback_fails_does_not_affect_others(tmp_path: Path) -> None:
    def fail(_: object) -> None:
        raise KeyError("news")

    async with opened_sqlite(tmp_path) as store:
        failing, other = (
            asyncio.create_task(store._writer.write(lambda db: 1, publish))
            for publish in (fail, lambda row: row)
        )
        await asyncio.wait((failing, other), timeout=10)
        assert isinstance(failing.exception(), KeyError) and other.result() == 1
