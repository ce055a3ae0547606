"""Tests requests and stops while the disk accepts no writes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.generation.generation import Generation
from headrace.generation.registry import cut_by
from headrace.generation.stream import LiveStream
from headrace.streams.events import Error, Finish
from headrace.streams.record import Names
from headrace.streams.store import ByConversation, Stored, StoreStalled
from headrace.streams.stores import sqlite_writer
from headrace.streams.stores.sqlite import SqliteStore
from headrace_common.errors import RequestError
from headrace_common.messages import FinishReason
from tests.fleet.fakes import FakeEngine
from tests.generation.fakes import make_request, opened, read, running
from tools.harness.eventually import settle
from tools.harness.stream_events import locked

OPTED_IN = Names(conversation="c", digest=b"1")
BY_NAME = ByConversation("", "c")


@contextlib.asynccontextmanager
async def serving(
    folder: Path, directory: Path
) -> AsyncIterator[tuple[Generation, FakeEngine, SqliteStore]]:
    store = SqliteStore.open(directory)
    try:
        async with asyncio.timeout(20), running(folder, store) as (generation, engine):
            yield generation, engine, store
    finally:
        await store.close()


def create_last(
    store: SqliteStore, disk: contextlib.ExitStack, directory: Path
) -> Callable[..., Awaitable[Stored]]:
    """Return a `create` after whose first call the disk is stuck until `disk` is closed."""
    create = store.create

    async def create_and_lock(*claim: Any) -> Stored:
        created = await create(*claim)
        disk.enter_context(locked(directory))
        return created

    return create_and_lock


async def refused(work: Awaitable[Any]) -> RequestError:
    with pytest.raises(RequestError) as error:
        await work
    return error.value


async def test_a_stop_is_answered_at_once_and_takes_effect_once_the_disk_works(
    folder: Path, tmp_path: Path
) -> None:
    async with serving(folder, tmp_path) as (generation, engine, _):
        stream = await opened(generation, engine, OPTED_IN)
        with locked(tmp_path):
            stopping = asyncio.create_task(generation.streams.discard("", BY_NAME))
            while not engine.cancels:
                await asyncio.sleep(0)
            await engine.let_go()
            error = await refused(stopping)
        assert (error.code, error.kind.status) == ("storage_unavailable", 503)
        last = (await read(stream))[-1]
        assert isinstance(last, Error) and last.code == "cancelled"
        await generation.streams.discard("", BY_NAME)
        assert await generation.streams.find("", BY_NAME) is None


async def test_a_stop_takes_effect_even_if_the_write_buffer_is_full(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(folder, tmp_path) as (generation, engine, store):
        stream = await opened(generation, engine, OPTED_IN)
        assert isinstance(stream, LiveStream)
        other = await opened(generation, engine, Names(conversation="d", digest=b"2"))
        other.beat("data", 5)
        with locked(tmp_path):
            await store.stalled.wait()
            monkeypatch.setattr(sqlite_writer, "MAX_WAITING_BYTES", 1)
            stream.beat("data", 5)  # finds no room, so the stream waits to be resumed
            await settle()
            await refused(generation.streams.stop(stream))
        await store.writable.wait()
        last = (await read(stream))[-1]
        assert isinstance(last, Error) and last.code == "cancelled"


async def test_a_request_that_cannot_be_stored_is_refused_and_not_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(folder, tmp_path) as (generation, engine, store):
        with contextlib.ExitStack() as disk:
            monkeypatch.setattr(store, "create", create_last(store, disk, tmp_path))
            error = await refused(generation.open(make_request(), OPTED_IN))
            assert error.code == "storage_unavailable"
        (stream,) = generation.streams
        await stream.ended.wait()
        assert not engine.submits


async def test_a_request_with_a_key_runs_once_the_disk_can_store_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = Names(key="k", digest=b"1")
    async with serving(folder, tmp_path) as (generation, engine, store):
        with contextlib.ExitStack() as disk:
            monkeypatch.setattr(store, "create", create_last(store, disk, tmp_path))
            error = await refused(generation.open(make_request(), names))
            assert error.code == "storage_unavailable"
            assert not engine.submits
        await store.writable.wait()
        stream = await generation.streams.find_equal(names)
        assert isinstance(stream, LiveStream)
        assert [stream] == [*generation.streams]
        await settle()
        await engine.finish(engine.newest, FinishReason.LENGTH)
        assert isinstance((await read(stream))[-1], Finish)


async def test_a_stop_takes_effect_while_a_stalled_stream_is_being_resumed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(folder, tmp_path) as (generation, engine, store):
        stream = await opened(generation, engine, OPTED_IN)
        other = await opened(generation, engine, Names(conversation="d", digest=b"2"))
        assert isinstance(stream, LiveStream)
        resume = generation.resumption._resume

        async def resume_after_a_stop(*stream_and_cut: Any) -> None:
            stream.stop(cut_by("cancelled"))
            await resume(*stream_and_cut)

        monkeypatch.setattr(generation.resumption, "_resume", resume_after_a_stop)
        other.beat("data", 5)
        with locked(tmp_path):
            await store.stalled.wait()
            monkeypatch.setattr(sqlite_writer, "MAX_WAITING_BYTES", 1)
            stream.beat("data", 5)  # finds no room, so the stream waits to be resumed
            await settle()
        last = (await read(stream))[-1]
        assert isinstance(last, Error) and last.code == "cancelled"


async def test_a_retry_is_refused_until_its_refused_stream_has_ended(
    folder: Path, tmp_path: Path
) -> None:
    names = Names(key="k", digest=b"1")
    async with serving(folder, tmp_path) as (generation, engine, _):
        stream = await opened(generation, engine, names)
        with locked(tmp_path):
            assert isinstance(stream, LiveStream)
            stream.stop(StoreStalled("The disk is full."))
            await engine.let_go()
            assert isinstance(await refused(generation.streams.find_equal(names)), StoreStalled)
        await stream.ended.wait()
        assert await generation.streams.find_equal(names) is None


async def test_a_request_stored_after_the_shutdown_is_left_to_the_next_server(
    folder: Path, tmp_path: Path
) -> None:
    async with serving(folder, tmp_path) as (generation, engine, store):
        with locked(tmp_path):
            opening = asyncio.create_task(generation.open(make_request(), OPTED_IN))
            while not store._writer._num_waiting:
                await asyncio.sleep(0)
            await generation.fleet.close()
        assert (await refused(opening)).code == "server_restarting"
        assert not engine.submits
    store = SqliteStore.open(tmp_path)
    (left,) = await store.unfinished()
    assert left.record.names == OPTED_IN
    await store.close()


async def test_a_server_on_a_full_disk_runs_requests_but_cannot_find_streams(
    folder: Path, tmp_path: Path
) -> None:
    async with serving(folder, tmp_path) as (generation, engine, _):
        await opened(generation, engine, OPTED_IN)
    store = SqliteStore.open(tmp_path)
    with locked(tmp_path):
        async with asyncio.timeout(20), running(folder, store) as (generation, engine):
            await store.stalled.wait()
            assert isinstance(await refused(generation.streams.find("", BY_NAME)), StoreStalled)
            await generation.open(make_request())  # a plain one needs no disk
    await store.close()
