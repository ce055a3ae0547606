"""Tests that streams without a writer are resumed, or end if they were stopped."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.engines.client import EngineUp
from headrace.fleet import model_check
from headrace.fleet.model_host import ModelHost
from headrace.fleet.served_model import ServedModel
from headrace.generation.generation import Generation
from headrace.generation.registry import FinishedStream
from headrace.generation.resume import GONE
from headrace.generation.store_tasks import _do
from headrace.generation.stream import LiveStream
from headrace.streams.events import Error, Finish
from headrace.streams.log import LogGone
from headrace.streams.record import Names, Record
from headrace.streams.store import ByConversation, ById, WriterRequest
from headrace.streams.stores.memory import MemoryStore
from headrace_common.config.settings import ModelConfig
from headrace_common.errors import RequestError
from headrace_common.ids import StreamId
from headrace_common.messages import FinishReason
from headrace_common.request import Request
from headrace_common.sampling import Sampling
from tests.fleet.fakes import DOWN, READY, FakeEngine
from tests.generation.fakes import ask, make_request, models_of, opened, read, running
from tools.harness.eventually import settle
from tools.harness.stream_events import locked, opened_sqlite

OPTED_IN = Names(conversation="c", digest=b"1")
NAME = ByConversation("", "c")
GIVEN_UP = msgspec.structs.replace(DOWN, given_up=True)


def durable_store() -> MemoryStore:
    store = MemoryStore()
    store.is_durable = True
    return store


async def end_of(generation: Generation) -> str:
    """Return the error code with which the stream ended."""
    found = await generation.streams.find("", NAME)
    assert found is not None
    last = (await read(found))[-1]
    assert isinstance(last, Error)
    return last.code


async def test_a_stop_holds_for_the_next_engine_if_its_engine_is_given_up(
    folder: Path,
) -> None:
    async with models_of(folder, "ab", durable_store()) as (generation, engines):
        stream = await ask(generation, "a", OPTED_IN)
        await engines["a"][0].say(EngineUp(READY))
        stopping = asyncio.create_task(generation.streams.stop(stream))
        await settle()
        assert not stopping.done()
        await engines["a"][0].say(GIVEN_UP)
        assert stopping.done()
        generation.fleet.need(generation.fleet.hosts.get("a"))
        await settle()
        await engines["a"][1].say(EngineUp(READY))
        assert await end_of(generation) == "cancelled"
        assert not engines["a"][1].submits


async def test_a_stopped_stream_ends_without_another_engine(
    folder: Path,
) -> None:
    store = durable_store()
    async with models_of(folder, "ab", store) as (generation, engines):
        stream = await ask(generation, "a", OPTED_IN)
        await engines["a"][0].say(EngineUp(READY))
        stopping = asyncio.create_task(generation.streams.stop(stream))
        await settle()
        await engines["a"][0].say(GIVEN_UP)
        await stopping
        assert await end_of(generation) == "cancelled"


async def test_a_stop_is_refused_if_the_only_engine_is_given_up(folder: Path) -> None:
    async with running(folder, durable_store()) as (generation, engine):
        stream = await opened(generation, engine, OPTED_IN)
        stopping = asyncio.create_task(generation.streams.stop(stream))
        await settle()
        await engine.say(GIVEN_UP)
        with pytest.raises(RequestError, match="could not be restarted"):
            await stopping


@pytest.mark.parametrize("by", ["client", "another server", "newer request"])
async def test_a_stop_without_a_writer_holds_for_the_next_writer(folder: Path, by: str) -> None:
    async with models_of(folder, "ab", durable_store()) as (generation, engines):
        stream = await ask(generation, "a", OPTED_IN)
        (old,) = engines["a"]
        await old.say(EngineUp(READY))
        await submit_to(old)
        old.news.put(GIVEN_UP)
        while not stream.audience.pause.is_set.is_set():
            await asyncio.sleep(0)
        if by == "client":  # while the writer is ending
            assert not stream.ended.is_set()
            await generation.streams.stop(stream)
            assert await end_of(generation) == "cancelled"
        await settle()
        asked = WriterRequest(stream.record.id, "stop", "cancelled")
        if by == "another server":
            await _do(generation.streams, asked)
        elif by == "newer request":
            await generation.streams.claim(
                msgspec.structs.replace(stream.record, id=StreamId("newer"))
            )
        generation.fleet.need(generation.fleet.hosts.get("a"))
        await settle()
        await engines["a"][1].say(EngineUp(READY))
        found = await generation.streams.find("", ById(stream.record.id))
        assert isinstance(found, FinishedStream)
        end = (await read(found))[-1]
        code = "replaced" if by == "newer request" else "cancelled"
        assert isinstance(end, Error) and end.code == code
        assert not engines["a"][1].submits


@pytest.mark.parametrize("way", ["stop", "delete"])
async def test_a_stream_that_waits_for_another_engine_can_be_stopped_at_once(
    folder: Path, way: str
) -> None:
    async with models_of(folder, "ab", durable_store()) as (generation, engines):
        stream = await ask(generation, "a", OPTED_IN)
        await engines["a"][0].say(EngineUp(READY))
        await engines["a"][0].say(GIVEN_UP)
        await settle()
        streams, name = generation.streams, ById(stream.record.id)
        with pytest.raises(RequestError, match="could not be restarted"):
            await streams.find("", name)
        assert await streams.find("another", name, suspended=True) is None
        if way == "stop":
            found = await streams.find("", name, suspended=True)
            assert found is not None and found.state == "recovering"
            await streams.stop(found)
            assert await end_of(generation) == "cancelled"
        else:
            await streams.discard("", name)
            assert await streams.find("", name) is None
        generation.fleet.need(generation.fleet.hosts.get("a"))
        await settle()
        await engines["a"][1].say(EngineUp(READY))
        assert not generation.writers.tasks and not engines["a"][1].submits


async def test_a_stream_is_resumed_after_its_last_writers_pending_appends(
    folder: Path, tmp_path: Path
) -> None:
    async with (
        opened_sqlite(tmp_path) as store,
        models_of(folder, "ab", store) as (generation, engines),
    ):
        await ask(generation, "a", OPTED_IN)
        (old,) = engines["a"]
        await old.say(EngineUp(READY))
        await submit_to(old)
        with locked(tmp_path):
            await old.start(old.newest)
            await old.say(GIVEN_UP)
            generation.fleet.need(generation.fleet.hosts.get("a"))
            await settle()
            engine = engines["a"][1]
            await engine.say(EngineUp(READY))
        await submit_to(engine)
        await engine.start(engine.newest)
        await engine.finish(engine.newest, FinishReason.LENGTH)
        found = await generation.streams.find("", NAME)
        assert found is not None and isinstance((await read(found))[-1], Finish)


async def test_an_interrupted_conversation_change_ends_without_an_engine(
    folder: Path,
) -> None:
    store = durable_store()
    request = Request("/v1/responses", "", (), Sampling())
    await store.create(Record(StreamId("resp_1"), 1, request, (), "", OPTED_IN, is_durable=True))
    async with models_of(folder, "ab", store) as (generation, engines):
        found = await generation.streams.find("", NAME)
        assert found is not None and isinstance((await read(found))[-1], Finish)
        assert not any(engine.submits for made in engines.values() for engine in made)


@pytest.mark.parametrize("change", ["removed", "replaced"])
async def test_a_model_change_waits_for_a_stream_that_is_being_resumed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    store = durable_store()
    await leave_a_stream(folder, store)
    may_read = asyncio.Event()

    async def read_slowly(host: ModelHost) -> None:
        await may_read.wait()
        host.known = host.known or ServedModel(host.config)

    monkeypatch.setattr(ModelHost, "read", read_slowly)
    async with models_of(folder, "ab", store, is_known=False) as (generation, engines):
        fleet = generation.fleet
        old, other = fleet.hosts.all()
        config = msgspec.structs.replace(old.config, max_model_len=128)
        new = (ModelHost(config, old._start, old.metrics),) if change == "replaced" else ()
        fleet.become((*new, other))
        may_read.set()
        await settle()
        (engine,) = engines["a"]
        await engine.say(EngineUp(READY))
        await engine.finish(engine.newest, FinishReason.LENGTH)
        assert isinstance(await generation.streams.find("", NAME), FinishedStream)
        assert fleet.hosts.all() == (*new, other)


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), KeyError("model_type")])
async def test_the_streams_of_an_unreadable_model_are_kept_until_it_is_readable(
    folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    store = durable_store()
    await leave_a_stream(folder, store)
    fails = [error]

    def made(config: ModelConfig, **read: Any) -> ServedModel:
        if fails:
            raise fails[0]
        return ServedModel(config, **read)

    monkeypatch.setattr(model_check, "ServedModel", made)
    async with models_of(folder, "ab", store, is_known=False) as (generation, engines):
        with pytest.raises(RequestError, match="could not be restarted"):
            await generation.streams.find("", NAME)
        fails.clear()
        generation.fleet.need(generation.fleet.hosts.get("a"))
        while not engines["a"]:
            await asyncio.sleep(0.001)
        await engines["a"][0].say(EngineUp(READY))
        assert await generation.streams.find("", NAME) in generation.streams


async def test_a_stream_leaves_no_sequences_with_an_engine_that_is_given_up(
    folder: Path,
) -> None:
    async with models_of(folder, "ab", durable_store()) as (generation, engines):
        stream = await ask(generation, "a", OPTED_IN)
        await engines["a"][0].say(EngineUp(READY))
        await submit_to(engines["a"][0])
        assert stream._submission.parts
        await engines["a"][0].say(GIVEN_UP)
        await settle()
        host = generation.fleet.hosts.get("a")
        assert not host.users._owners and not stream._submission.parts


async def test_a_writer_cancelled_before_its_first_step_leaves_the_queue(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with models_of(folder, "ab", durable_store()) as (generation, engines):
        await ask(generation, "a")
        await engines["a"][0].say(EngineUp(READY))
        host, start = generation.fleet.hosts.get("a"), generation.writers.start
        queue = generation.queues.of(host)
        num_live = queue.num_live

        def start_and_lose(*about: Any) -> LiveStream:
            stream = start(*about)
            generation.writers.let_go([stream], GONE, GONE)
            return stream

        monkeypatch.setattr(generation.writers, "start", start_and_lose)
        await generation.open(msgspec.structs.replace(make_request(), model="a"), OPTED_IN)
        await settle()
        assert queue.num_live == num_live
        assert (
            len(generation.streams) == len(generation.writers.tasks) == len(list(host.users)) == 1
        )


async def test_a_stream_whose_log_is_being_read_at_shutdown_is_not_resumed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = durable_store()
    await leave_a_stream(folder, store)
    (left,) = await store.unfinished()
    may_read, read = asyncio.Event(), type(left.log).read

    async def read_slowly(*which: Any) -> Any:
        await may_read.wait()
        return await read(*which)

    monkeypatch.setattr(type(left.log), "read", read_slowly)
    async with models_of(folder, "ab", store) as (generation, _):
        await generation.fleet.close()
        await settle()
        may_read.set()
        await settle()
        assert not generation.writers.tasks
        assert not [it for it in asyncio.all_tasks() if "Generation.run" in repr(it)]


async def test_resuming_a_stream_lost_by_the_store_only_logs_a_warning(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = durable_store()
    await leave_a_stream(folder, store)
    (left,) = await store.unfinished()

    async def lose(*_: object) -> None:
        raise LogGone

    for method in ("append", "read"):
        monkeypatch.setattr(type(left.log), method, lose)
    async with models_of(folder, "ab", store):
        await settle()
        assert [it.levelname for it in caplog.records] == ["WARNING"]


async def test_a_drain_refuses_readers_of_a_stream_that_waits_for_its_model(
    folder: Path,
) -> None:
    async with models_of(folder, "ab", durable_store()) as (generation, engines):
        running = await ask(generation, "a")
        await engines["a"][0].say(EngineUp(READY))
        await ask(generation, "b", OPTED_IN)
        draining = asyncio.create_task(generation.drain(60))
        await settle()
        assert not running.ended.is_set()
        with pytest.raises(RequestError) as refused:
            await asyncio.wait_for(generation.streams.find("", NAME), 10)
        assert refused.value.code == "server_restarting"
        draining.cancel()


async def test_a_request_for_a_replaced_model_reads_the_new_one(folder: Path) -> None:
    async with models_of(folder, "ab") as (generation, engines):
        old, other = generation.fleet.hosts.all()
        config = msgspec.structs.replace(old.config, max_model_len=128)
        generation.fleet.become((ModelHost(config, old._start, old.metrics), other))
        assert generation.fleet.hosts.get("a").known is None
        stream = await ask(generation, "a")
        assert stream.state == "loading" and len(engines["a"]) == 1


async def submit_to(engine: FakeEngine) -> None:
    """Wait until the engine has a request."""
    while not engine.submits:
        await asyncio.sleep(0.001)


async def leave_a_stream(folder: Path, store: MemoryStore) -> None:
    """Leave an unfinished stream in the store, as a killed server would."""
    async with models_of(folder, "ab", store) as (generation, _):
        stream = await ask(generation, "a", OPTED_IN)
        generation.writers.tasks[stream].cancel()
        await settle()
