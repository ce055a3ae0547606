"""Tests that lookups find an unfinished stream together with its writer."""

import asyncio
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.generation import registry
from headrace.generation.event_builder import to_event
from headrace.generation.generation import Generation
from headrace.generation.registry import FinishedStream, cut_by
from headrace.generation.remote import RemoteStream
from headrace.generation.stream import LiveStream
from headrace.streams.events import AnyEvent, Error, Finish
from headrace.streams.log import LogGone
from headrace.streams.record import Names, Record
from headrace.streams.store import ByConversation, ById, Name, Retention, Stored, StoreStalled
from headrace.streams.stores.memory import MemoryLog, MemoryStore
from headrace_common.errors import RequestError
from headrace_common.ids import StreamId
from headrace_common.messages import FinishReason
from tests.fleet.fakes import DOWN, FakeEngine
from tests.generation.fakes import make_request, opened, read, running
from tools.harness.eventually import settle
from tools.harness.stream_events import some

OPTED_IN = Names(conversation="c", digest=b"1")
NAME = ByConversation("", "c")


async def test_a_lookup_waits_until_a_stream_without_a_writer_is_resumed(
    folder: Path,
) -> None:
    store = MemoryStore()
    async with running(folder, store) as (generation, engine):
        await opened(generation, engine, OPTED_IN)
        for task in list(generation.writers.tasks.values()):
            task.cancel()  # as a kill would: nothing more is written
        await settle()
        looking = asyncio.create_task(generation.streams.find("", NAME))
        await settle()
        assert not looking.done()
        looking.cancel()
    async with running(folder, store) as (generation, _):
        assert isinstance(await generation.streams.find("", NAME), LiveStream)


async def test_a_stream_is_found_live_while_it_is_being_opened(folder: Path) -> None:
    async with running(folder) as (generation, _):
        opening = asyncio.create_task(generation.open(make_request(), OPTED_IN))
        while (found := await generation.streams.find("", NAME)) is None:
            await asyncio.sleep(0)
        assert found is await opening


async def test_a_cursor_ahead_of_the_log_waits_for_its_event(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_LATE_S", 0.1)
    log = MemoryLog()
    record = Record(StreamId("s"), 1, make_request(), (), "")
    async with running(folder) as (generation, _):
        found = FinishedStream(record, log)
        reaching = asyncio.create_task(generation.streams.reach(found, 2))
        for event in some(3):
            await settle()
            assert not reaching.done()
            await log.append(event.seq, [event])
        assert await reaching == 3
        # A cursor that no server has sent is refused after a while.
        assert await generation.streams.reach(found, 3) == 3


async def test_a_cursor_beyond_a_durable_log_may_be_retried_until_the_log_ends(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_LATE_S", 0.01)
    log = MemoryLog()
    record = Record(StreamId("s"), 1, make_request(), (), "", is_durable=True)
    async with running(folder) as (generation, _):
        found = FinishedStream(record, log)
        with pytest.raises(StoreStalled):
            await generation.streams.reach(found, 1)
        await log.append(0, [to_event(cut_by("cancelled"), 0, at_ms=0)])
        assert await generation.streams.reach(found, 1) == 1


class SlowStore(MemoryStore):
    """A store that delays the answer to `create` after it has stored the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = asyncio.Event()

    async def create(self, record: Record, replaces: StreamId | None = None) -> Stored:
        stored = await super().create(record, replaces)
        await self.answers.wait()
        return stored


async def test_a_stream_is_found_live_if_its_request_was_cancelled_while_stored(
    folder: Path,
) -> None:
    store = SlowStore()
    async with running(folder, store) as (generation, _):
        opening = asyncio.create_task(generation.open(make_request(), OPTED_IN))
        while not await store.find(NAME):
            await asyncio.sleep(0)
        opening.cancel()
        looking = asyncio.create_task(generation.streams.find("", NAME))
        await settle()
        store.answers.set()
        assert isinstance(await looking, LiveStream)
        with pytest.raises(asyncio.CancelledError):
            await opening


class StoppedStore(MemoryStore):
    """A store in which a new stream is already stopped when `create` returns."""

    async def create(self, record: Record, replaces: StreamId | None = None) -> Stored:
        stored = await super().create(record, replaces)
        return msgspec.structs.replace(stored, stop_code="cancelled")


async def test_a_stream_stopped_while_it_was_stored_generates_nothing(folder: Path) -> None:
    async with running(folder, StoppedStore()) as (generation, engine):
        last = (await read(await opened(generation, engine, OPTED_IN)))[-1]
        assert isinstance(last, Error) and last.code == "cancelled"
        assert not engine.submits


class LateStore(MemoryStore):
    """A store that delays the list of unfinished streams."""

    def __init__(self) -> None:
        super().__init__()
        self.answers = asyncio.Event()

    async def unfinished(self) -> list[Stored]:
        await self.answers.wait()
        return await super().unfinished()


async def test_a_new_stream_is_not_mistaken_for_one_of_an_earlier_server(folder: Path) -> None:
    store = LateStore()
    async with running(folder, store) as (generation, engine):
        assert generation.fleet.pinned
        queue = generation.queues.of(generation.fleet.pinned)
        opening = asyncio.create_task(generation.open(make_request(), OPTED_IN))
        while not queue.num_live:
            await asyncio.sleep(0)
        await settle()
        store.answers.set()
        stream = await opening
        await settle()
        await engine.finish(engine.newest, FinishReason.LENGTH)
        assert isinstance((await read(stream))[-1], Finish)
        assert len(engine.submits) == 1


async def test_a_stream_stored_during_the_shutdown_is_left_to_the_next_server(
    folder: Path,
) -> None:
    store = SlowStore()
    store.is_durable = True
    async with running(folder, store) as (generation, _):
        opening = asyncio.create_task(generation.open(make_request(), OPTED_IN))
        while not await store.find(NAME):
            await asyncio.sleep(0)
        await generation.fleet.close()
        await settle()
        store.answers.set()
        with pytest.raises(RequestError) as refused:
            await opening
        assert refused.value.code == "server_restarting"
        assert not len(generation.streams)
    async with running(folder, store) as (generation, _):
        assert isinstance(await generation.streams.find("", NAME), LiveStream)


async def test_a_stop_that_the_writer_cannot_confirm_before_the_shutdown_is_refused(
    folder: Path,
) -> None:
    store = MemoryStore()
    store.is_durable = True
    async with running(folder, store) as (generation, engine):
        stream = await opened(generation, engine, OPTED_IN)
        stopping = asyncio.create_task(generation.streams.stop(stream))
        await settle()
        await generation.fleet.close()  # before the engine confirms the cancel
        await settle()
        assert code_of(stopping) == "server_restarting"


async def test_a_stream_that_has_ended_is_found_as_finished(folder: Path) -> None:
    async with running(folder) as (generation, engine):
        stream = await opened(generation, engine, OPTED_IN)
        stopping = asyncio.create_task(generation.streams.stop(stream))
        await settle()
        await engine.let_go()
        await stopping
        await settle()
        assert isinstance(await generation.streams.find("", NAME), FinishedStream)


async def test_the_reader_of_a_stream_lost_by_the_store_is_told_to_send_it_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # A failover of Redis can lose a whole stream.
    async with running(folder) as (generation, engine):
        stream = await opened(generation, engine, OPTED_IN)
        assert isinstance(stream, LiveStream)

        async def append(*_: object) -> None:
            raise LogGone

        monkeypatch.setattr(type(stream.log), "append", append)
        await engine.start(engine.newest)
        await stream.ended.wait()
        with pytest.raises(RequestError, match="send the request again"):
            stream.audience.pause.check()
        assert [it.levelname for it in caplog.records] == ["WARNING"]
        assert engine.cancels


async def test_removing_a_writer_does_not_remove_its_successor(folder: Path) -> None:
    async with running(folder) as (generation, engine):
        old = await opened(generation, engine, OPTED_IN)
        assert isinstance(old, LiveStream)
        place, admitted = old._ticket, old._admitted
        successor = LiveStream(old.record, old._builder, old.log, place, admitted, 0.0)
        generation.streams.add(successor)
        generation.streams.remove(old)
        assert await generation.streams.find("", NAME) is successor


class FakeWriter:
    """A fake writer of a stream on another server."""

    async def stop(self, code: str) -> None: ...

    def beat(self, form: str, interval_s: float) -> None: ...

    def recent(self) -> list[AnyEvent]:
        return []


class TakenStore(MemoryStore):
    """A store whose streams were taken over by another server, which wrote one more event."""

    is_durable = True

    def surely_writes(self, stream_id: StreamId) -> bool:
        return False

    async def find(self, name: Name) -> Stored | None:
        if (stored := await super().find(name)) is None:
            return None
        log = MemoryLog()
        await log.append(0, some(stored.log.next_seq + 1))
        return Stored(stored.record, log, elsewhere=FakeWriter())


async def test_a_stream_taken_over_by_another_server_is_found_as_remote(
    folder: Path,
) -> None:
    async with running(folder, TakenStore()) as (generation, engine):
        stream = await opened(generation, engine, OPTED_IN)
        found = await generation.streams.find("", ById(stream.record.id))
        assert isinstance(found, RemoteStream)
        assert found.log.next_seq == stream.log.next_seq + 1


async def test_readers_of_a_durable_stream_get_an_error_once_its_engine_is_given_up(
    folder: Path,
) -> None:
    store = MemoryStore()
    store.is_durable = True
    async with running(folder, store) as (generation, engine):
        stream = await opened(generation, engine, OPTED_IN)
        reading = asyncio.create_task(stream.audience.pause.unless(read(stream)))
        await settle()
        engine.news.put(msgspec.structs.replace(DOWN, given_up=True))
        await engine.close()  # at once, as a supervisor that gives up does
        await settle()
        assert code_of(reading) == "engine_failed"
        looking = asyncio.create_task(generation.streams.find("", NAME))
        await settle()
        assert code_of(looking) == "engine_failed"


async def test_a_lookup_does_not_wait_for_a_stream_whose_log_cannot_be_written(
    folder: Path,
) -> None:
    store = MemoryStore()
    async with running(folder, store) as (generation, engine):
        await opened(generation, engine, OPTED_IN)
        await store.unfinished()  # claims its log, so that no append of the writer succeeds
        await engine.finish(engine.newest, FinishReason.LENGTH)
        looking = asyncio.create_task(generation.streams.find("", NAME))
        await settle()
        assert code_of(looking) == "internal_error"


async def test_a_kept_stream_is_found_after_its_end_but_is_not_stored(folder: Path) -> None:
    store = MemoryStore()
    async with running(folder, store) as (generation, engine):
        id = await ended_id(generation, engine, Names(is_kept=True))
        assert isinstance(await generation.streams.find("", ById(id)), FinishedStream)
        assert await generation.streams.find("another", ById(id)) is None
        assert await store.find(ById(id)) is None
        await generation.streams.discard("", ById(id))
        assert await generation.streams.find("", ById(id)) is None
        plain = await ended_id(generation, engine, Names())
        assert await generation.streams.find("", ById(plain)) is None


async def test_kept_streams_with_large_bodies_are_deleted_early(folder: Path) -> None:
    async with running(folder) as (generation, engine):
        body, ids = bytes(33 << 20), []
        for _ in range(10):
            ids.append(await ended_id(generation, engine, Names(is_kept=True), kept=body))
        found = [await generation.streams.find("", ById(id)) for id in ids]
        assert found[0] is None and found[-1] is not None


async def test_finished_streams_beyond_the_configured_limits_are_deleted(folder: Path) -> None:
    store = MemoryStore()
    store.is_durable = True
    async with running(folder, store) as (generation, engine):
        for name in "abc":
            await ended_id(generation, engine, Names(conversation=name, digest=b"1"))
    for limits, num_left in (
        ({"max_kept_streams": 2}, 2),
        ({"max_kept_stream_bytes": 1}, 0),
    ):
        async with running(folder, store, **limits):
            assert (await store.sweep(Retention(), time.time())).num_streams == num_left


async def ended_id(
    generation: Generation, engine: FakeEngine, names: Names, **fields: object
) -> StreamId:
    """Open a stream, finish and read it, and return its id."""
    stream = await opened(generation, engine, names, **fields)
    await engine.finish(engine.newest, FinishReason.LENGTH)
    await read(stream)
    return stream.record.id


def code_of(task: asyncio.Task[Any]) -> str:
    """Return the error code with which the task failed."""
    assert task.done()
    error = task.exception()
    assert isinstance(error, RequestError)
    return error.code
