"""A generation around a fake engine, and helpers to open and read its streams."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec

from headrace.engines.client import EngineUp
from headrace.fleet.model_host import ModelHost
from headrace.fleet.served_model import ServedModel
from headrace.generation.generation import PLAIN, Generation
from headrace.generation.registry import Found
from headrace.generation.stream import LiveStream
from headrace.metrics.metrics import Metrics
from headrace.protocols.worker import Jobs
from headrace.streams.events import AnyEvent, Tokens
from headrace.streams.record import Names
from headrace.streams.store import Store
from headrace.streams.stores.memory import MemoryStore
from headrace.workers.pool import ThreadJobRunner
from headrace_common.config.settings import LoadingConfig, ModelConfig, ServerConfig, StreamConfig
from headrace_common.request import Request, Text
from headrace_common.sampling import Sampling
from tests.fleet.fakes import READY, FakeEngine
from tools.harness.eventually import settle

Engines = dict[str, list[FakeEngine]]


@contextlib.asynccontextmanager
async def running(
    folder: Path, store: Store | None = None, **options: Any
) -> AsyncIterator[tuple[Generation, FakeEngine]]:
    """Run a generation over a fake engine that is up, for at most a minute."""
    model = ModelConfig(model=str(folder), served_model_name=("tiny",))
    config = ServerConfig(models=(model,), streams=StreamConfig(**options))
    engine = FakeEngine()
    served = ServedModel(model)
    work = ThreadJobRunner(Jobs(served))
    metrics = Metrics()
    hosts = (ModelHost(model, lambda _: engine, metrics, served),)
    generation = Generation(config, hosts, store or MemoryStore(), work, metrics)
    task = asyncio.create_task(generation.run())
    await settle()  # what the store holds is taken up long before an engine has loaded
    await engine.say(EngineUp(READY))
    try:
        async with asyncio.timeout(60):
            yield generation, engine
    finally:
        await engine.close()
        await asyncio.wait([task], timeout=5)
        task.cancel()


@contextlib.asynccontextmanager
async def models_of(
    folder: Path, names: str, store: Store | None = None, is_known: bool = True
) -> AsyncIterator[tuple[Generation, Engines]]:
    """Run a generation with unloaded models of one letter each; collect the engines it starts."""
    configs = [ModelConfig(model=str(folder), served_model_name=(name,)) for name in names]
    config = ServerConfig(
        models=tuple(configs), streams=StreamConfig(), loading=LoadingConfig(max_models=1)
    )
    served = [ServedModel(one) for one in configs]
    engines: Engines = {name: [] for name in names}

    def start(config: ModelConfig) -> FakeEngine:
        engines[config.served_model_name[0]].append(engine := FakeEngine())
        return engine

    metrics = Metrics()
    hosts = (
        ModelHost(one, start, metrics, model if is_known else None)
        for one, model in zip(configs, served, strict=True)
    )
    work = ThreadJobRunner(Jobs(*served))
    generation = Generation(config, tuple(hosts), store or MemoryStore(), work, metrics)
    task = asyncio.create_task(generation.run())
    await settle()
    try:
        async with asyncio.timeout(60):
            yield generation, engines
    finally:
        await generation.fleet.close()
        await asyncio.wait([task], timeout=5)
        task.cancel()


def make_request(text: str = "hello", **fields: object) -> Request:
    sampling = fields.pop("sampling", Sampling(temperature=0))
    return Request(
        route="/v1/completions",
        model="tiny",
        prompts=(Text(text),),
        sampling=sampling,  # type: ignore[arg-type]
        **fields,  # type: ignore[arg-type]
    )


async def ask(generation: Generation, model: str, names: Names = PLAIN) -> LiveStream:
    request = msgspec.structs.replace(make_request(), model=model)
    stream = await generation.open(request, names)
    await settle()
    assert isinstance(stream, LiveStream)
    return stream


async def opened(
    generation: Generation, engine: FakeEngine, names: Names = PLAIN, **fields: object
) -> Found:
    """Open a stream and wait until it is submitted to the engine."""
    stream = await generation.open(make_request(**fields), names)  # type: ignore[arg-type]
    await settle()
    return stream


async def read(stream: Found, after: int = -1) -> list[AnyEvent]:
    """Read all events to the end and mark them as sent."""
    found = []
    async with stream.audience.reader(after) as events:
        async for event in events:
            found.append(event)
            events.sent(event)
    await settle()
    return found


def text_of(events: list[AnyEvent]) -> str:
    return "".join(event.text for event in events if isinstance(event, Tokens))
