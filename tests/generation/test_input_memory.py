"""Tests the limit on the inputs of all requests: what counts and when it is released."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.generation.generation import PLAIN, Generation
from headrace.generation.stream import LiveStream
from headrace.intake.intake import Intake
from headrace.streams.record import Names
from headrace.streams.stores.memory import MemoryStore
from headrace.streams.stores.sqlite import SqliteStore
from headrace.workers.image_file import Admitted, PixelFile
from headrace.workers.input_memory import InputMemory
from headrace_common.config.settings import ServerConfig
from headrace_common.errors import RequestError
from headrace_common.messages import FinishReason
from headrace_common.request import Text
from headrace_common.vector_request import VectorRequest
from headrace_common.worker_jobs import CheckedBody
from tests.fleet.fakes import FakeEngine
from tests.generation.fakes import make_request, models_of, opened, running
from tools.harness.eventually import settle

LARGE = 100_000
LIMIT = 250_000


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


async def held(generation: Generation, engine: FakeEngine, names: Names = PLAIN) -> LiveStream:
    """Open a waiting stream that holds a large input."""
    stream = await opened(generation, engine, names, kept=bytes(LARGE))
    assert isinstance(stream, LiveStream)
    return stream


async def refusal(generation: Generation, **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as refused:
        await generation.open(make_request(kept=bytes(LARGE)), **fields)
    return refused.value


async def test_the_inputs_of_all_waiting_requests_share_one_limit(folder: Path) -> None:
    async with running(folder, max_total_input_bytes=LIMIT) as (generation, engine):
        await held(generation, engine)
        first = generation.queues.inputs.num_bytes
        assert LARGE < first < LARGE + 1000
        await held(generation, engine)
        error = await refusal(generation)
        assert (error.code, error.kind.status) == ("server_overloaded", 429)
        assert error.retry_after_s > 0 and "--max-total-input-bytes" in error.message
        await opened(generation, engine)  # Small inputs are never refused.
        assert generation.queues.inputs.num_bytes == 2 * first


async def test_a_key_may_use_half_of_the_input_memory(folder: Path) -> None:
    async with running(folder, max_total_input_bytes=LIMIT) as (generation, engine):
        await held(generation, engine, Names(owner="a"))
        error = await refusal(generation, names=Names(owner="a"))
        assert "of this key" in error.message
        await held(generation, engine, Names(owner="b"))


async def test_an_input_beyond_the_limit_is_accepted_if_no_other_is_held(
    folder: Path,
) -> None:
    async with running(folder, max_total_input_bytes=1) as (generation, engine):
        await held(generation, engine, Names(owner="a"))
        await refusal(generation, names=Names(owner="b"))


async def leave(stream: LiveStream) -> None:
    async with stream.audience.reader():
        pass


async def test_the_input_memory_is_released_however_a_request_ends(folder: Path) -> None:
    async with running(folder, linger_s=0.0) as (generation, engine):
        inputs = generation.queues.inputs
        finished = await held(generation, engine)
        await engine.finish(engine.newest, FinishReason.LENGTH)
        assert inputs.num_bytes > LARGE, "a reader may still need the record"
        await leave(finished)
        await until(lambda: not inputs.num_bytes)
        left = await held(generation, engine)
        await leave(left)
        await engine.let_go()
        await until(lambda: not inputs.num_bytes)
        with pytest.raises(RequestError):
            await generation.open(make_request("x" * 300, kept=bytes(LARGE)))
        assert not inputs.num_bytes
        request = make_request()
        checked = CheckedBody({}, (), msgspec.msgpack.encode(request.prompts), kept=bytes(LARGE))
        opening = asyncio.create_task(generation.open(request, PLAIN, checked))
        await asyncio.sleep(0)
        assert inputs.num_bytes, "the request is being tokenized"
        opening.cancel()
        await asyncio.wait([opening])
        assert not inputs.num_bytes
        last = await held(generation, engine)
        await generation.drain(0)
        await leave(last)
        await until(lambda: not inputs.num_bytes)


async def test_an_equal_request_with_the_same_key_counts_once(folder: Path) -> None:
    async with running(folder) as (generation, engine):
        names = Names(key="k", digest=b"same")
        await held(generation, engine, names)
        once = generation.queues.inputs.num_bytes
        await held(generation, engine, names)
        assert generation.queues.inputs.num_bytes == once


async def test_a_resumed_stream_counts_even_if_it_does_not_fit(
    folder: Path, tmp_path: Path
) -> None:
    store = SqliteStore.open(tmp_path)
    async with running(folder, store) as (generation, engine):
        await held(generation, engine, Names(key="k"))
    assert not generation.queues.inputs.num_bytes
    await store.close()
    store = SqliteStore.open(tmp_path)
    async with running(folder, store, max_total_input_bytes=1) as (generation, engine):
        await until(lambda: len(generation.streams) == 1)
        assert generation.queues.inputs.num_bytes > LARGE
        await until(lambda: bool(engine.submits))
        await engine.finish(engine.newest, FinishReason.LENGTH)
        await until(lambda: not generation.queues.inputs.num_bytes)
    await store.close()


async def test_prepared_images_count_until_the_stream_ends(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A small file can contain a large image.

    async def admit(*arguments: object) -> Admitted:
        pixels = PixelFile()
        os.truncate(pixels.path, LARGE)
        return Admitted((bytes(20),), pixels=pixels)

    monkeypatch.setattr("headrace.generation.generation.admit", admit)
    async with running(folder, max_total_input_bytes=LIMIT) as (generation, engine):
        await opened(generation, engine)
        await opened(generation, engine)
        with pytest.raises(RequestError, match="--max-total-input-bytes"):
            await generation.open(make_request())
        await engine.finish(engine.newest, FinishReason.LENGTH)
        await opened(generation, engine)


async def test_a_body_counts_while_its_model_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with models_of(folder, "ab", is_known=False) as (generation, _):
        ready = asyncio.Event()

        async def read(host: object) -> None:
            await ready.wait()
            raise RequestError("load_failed", "")

        monkeypatch.setattr(generation.fleet, "read", read)
        intake = Intake(generation, ServerConfig())
        checked = CheckedBody({"model": "a"}, (Text(""),), bytes(LARGE))
        opening = asyncio.create_task(intake.open("/v1/completions", checked, Names()))
        await settle()
        assert generation.queues.inputs.num_bytes == LARGE
        ready.set()
        with pytest.raises(RequestError):
            await opening
        assert not generation.queues.inputs.num_bytes


async def test_texts_to_embed_count_while_they_wait(folder: Path) -> None:
    async with models_of(folder, "ab") as (generation, _):
        request = VectorRequest("/v1/embeddings", "embed", bytes(LARGE), "input", model="a")
        making = asyncio.create_task(generation.vectors.make(request))
        await settle()
        assert generation.queues.inputs.num_bytes == LARGE
        making.cancel()
        await asyncio.wait([making])
        assert not generation.queues.inputs.num_bytes


async def test_streams_in_memory_are_deleted_soon_if_their_inputs_are_large(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.generation.registry._MAX_UNSWEPT", LARGE)
    store = MemoryStore()
    async with running(folder, store, max_kept_stream_bytes=1) as (generation, engine):
        await held(generation, engine, Names(key="k"))
        await engine.finish(engine.newest, FinishReason.LENGTH)
        assert len(store._entries) == 1
        await held(generation, engine, Names(key="next"))
        await until(lambda: len(store._entries) == 1)


def test_an_input_that_shrinks_frees_memory() -> None:
    memory = InputMemory(LIMIT)
    with memory.hold("", LARGE) as body, memory.hold("", LARGE):
        with pytest.raises(RequestError):
            memory.hold("", LARGE)
        body.resize(0)
        memory.hold("", LARGE).close()
    assert not memory.num_bytes
