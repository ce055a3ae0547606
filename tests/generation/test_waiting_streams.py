"""Tests streams that wait for their model: one of two, or the only one of a server."""

import asyncio
import contextlib
from pathlib import Path

import msgspec
import pytest

from headrace.engines.client import EngineDown, EngineUp
from headrace.generation.generation import Generation
from headrace.generation.stream import LiveStream
from headrace.streams.events import Error, Heartbeat, Served
from headrace_common.errors import RequestError
from headrace_common.messages import FinishReason, Loading
from tests.fleet.fakes import READY, FakeEngine
from tests.generation.fakes import Engines, ask, make_request, models_of, read
from tools.harness.eventually import settle


def two_models(
    folder: Path,
) -> contextlib.AbstractAsyncContextManager[tuple[Generation, Engines]]:
    """Run a generation with the unloaded models `a` and `b`."""
    return models_of(folder, "ab")


async def finish(engine: FakeEngine) -> None:
    """Finish the newest request of the engine."""
    await engine.start(engine.newest)
    await engine.finish(engine.newest, FinishReason.LENGTH)


async def failure_of(stream: LiveStream) -> str:
    last = (await read(stream))[-1]
    assert isinstance(last, Error)
    return last.code


async def test_a_stream_gets_the_load_progress_and_then_one_served_event(folder: Path) -> None:
    async with two_models(folder) as (generation, engines):
        stream = await ask(generation, "a")
        (engine,) = engines["a"]
        assert stream.state == "loading" and not engine.submits
        await engine.say(Loading(0.5))
        await engine.say(EngineUp(READY))
        assert stream.state == "queued" and len(engine.submits) == 1
        await finish(engine)
        events = await read(stream)
        beats = [event.progress for event in events if isinstance(event, Heartbeat)]
        assert beats == [None, 0.5]
        (served,) = (event for event in events if isinstance(event, Served))
        assert served.system_fingerprint == "fp_0123456789ab"


async def test_a_stream_waits_while_a_servers_only_model_loads(folder: Path) -> None:
    async with models_of(folder, "a") as (generation, engines):
        stream = await ask(generation, "a")
        (engine,) = engines["a"]
        assert (generation.state, stream.state, engine.submits) == ("loading", "loading", [])
        await engine.say(Loading(0.25, "compiling kernels", "(2 of 8)"))
        await engine.say(EngineUp(READY))
        assert (generation.state, stream.state) == ("ok", "queued")
        await finish(engine)
        events = await read(stream)
        stages = [event.stage for event in events if isinstance(event, Heartbeat)]
        assert stages == ["starting the engine", "compiling kernels (2 of 8)"]


async def test_a_failed_load_of_the_only_model_ends_its_streams(
    folder: Path,
) -> None:
    async with models_of(folder, "a") as (generation, engines):
        stream = await ask(generation, "a")
        down = EngineDown("model_too_large", "It takes 9 GiB.", given_up=True)
        await engines["a"][0].say(down)
        await engines["a"][0].let_go()
        assert await failure_of(stream) == "load_failed"
        assert generation.died.is_set() and generation.last_words == "It takes 9 GiB."
        with pytest.raises(RequestError, match="stopped for good"):
            await generation.open(msgspec.structs.replace(make_request(), model="a"))


async def test_a_model_is_unloaded_for_another_once_its_streams_have_ended(folder: Path) -> None:
    async with two_models(folder) as (generation, engines):
        first = await ask(generation, "a")
        await engines["a"][0].say(EngineUp(READY))
        second, third = await ask(generation, "b"), await ask(generation, "a")
        # A stream behind another that waits for memory waits, too.
        assert third.state == "loading" and not engines["b"]
        await finish(engines["a"][0])
        await read(first)
        await engines["b"][0].say(EngineUp(READY))
        assert (second.state, third.state) == ("queued", "loading")
        second.stop(RequestError("cancelled", ""))
        await engines["b"][0].let_go()
        await read(second)
        await engines["a"][1].say(EngineUp(READY))
        assert third.state == "queued"


async def test_unloading_cancels_a_load_unless_a_request_waits_for_it(folder: Path) -> None:
    async with two_models(folder) as (generation, engines):
        fleet, host = generation.fleet, generation.fleet.hosts.get("a")
        fleet.need(host)
        await settle()
        fleet.unload(host)
        await settle()
        assert host.engine.state == "unloaded"
        stream = await ask(generation, "a")
        fleet.unload(host)
        await settle()
        await engines["a"][1].say(EngineUp(READY))
        assert stream.state == "queued"
        await finish(engines["a"][1])
        await read(stream)
        await settle()
        assert host.engine.state == "unloaded"  # once its stream had ended


async def test_a_failed_load_ends_the_streams_that_wait_for_it(folder: Path) -> None:
    async with two_models(folder) as (generation, engines):
        streams = [await ask(generation, "a") for _ in range(2)]
        await engines["a"][0].say(EngineDown("load_failed", "No memory.", given_up=True))
        assert [await failure_of(stream) for stream in streams] == ["load_failed"] * 2
        again = await ask(generation, "a")  # the next one tries again
        assert again.state == "loading" and len(engines["a"]) == 2


async def test_a_prompt_too_long_for_the_loaded_model_ends_with_an_error(folder: Path) -> None:
    async with two_models(folder) as (generation, engines):
        stream = await ask(generation, "a")
        small = msgspec.structs.replace(READY, max_model_len=4)
        await engines["a"][0].say(EngineUp(small))
        assert await failure_of(stream) == "context_length_exceeded"
        assert not engines["a"][0].submits


async def test_a_stream_stopped_while_it_waits_leaves_the_queue(folder: Path) -> None:
    async with two_models(folder) as (generation, engines):
        await ask(generation, "a")
        await engines["a"][0].say(EngineUp(READY))
        waiting, behind = await ask(generation, "b"), await ask(generation, "a")
        await generation.streams.stop(waiting)
        assert await failure_of(waiting) == "cancelled"
        assert behind.state == "queued" and not engines["b"]


async def test_a_drain_does_not_wait_for_a_load(folder: Path) -> None:
    async with two_models(folder) as (generation, _):
        stream = await ask(generation, "a")
        draining = asyncio.create_task(generation.drain(60))
        assert await failure_of(stream) == "server_shutdown"
        await asyncio.wait_for(draining, 10)
