"""Many at once = each alone, through generation, scheduler, memory and a real model."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headrace.engines.local import LocalEngine
from headrace.fleet.model_host import ModelHost
from headrace.fleet.served_model import ServedModel
from headrace.generation.generation import Generation
from headrace.metrics.metrics import Metrics
from headrace.protocols.worker import Jobs
from headrace.streams.events import Finish, Progress, Tokens
from headrace.streams.stores.memory import MemoryStore
from headrace.workers.pool import ThreadJobRunner
from headrace_common.config.settings import ModelConfig, SchedulerConfig, ServerConfig
from headrace_common.request import Request, Text
from headrace_common.sampling import Sampling

PROMPTS = [f"{number}: " + "water over the wheel " * (number % 7) for number in range(64)]
GREEDY = Sampling(temperature=0, max_tokens=24, ignore_eos=True)
SEEDED = Sampling(temperature=1.2, top_p=0.95, max_tokens=24, ignore_eos=True, seed=7)

Ask = Callable[[str, Sampling], Awaitable[tuple[int, ...]]]


@asynccontextmanager
async def asking(folder: Path, **scheduler: int) -> AsyncIterator[tuple[Generation, Ask]]:
    config = ModelConfig(
        model=str(folder),
        served_model_name=("tiny",),
        threads=1,
        max_model_len=512,
        scheduler=SchedulerConfig(**scheduler),
    )
    engine, _ = await LocalEngine.start(config)
    server = ServerConfig(models=(config,))
    served = ServedModel(config)
    work = ThreadJobRunner(Jobs(served))
    metrics = Metrics()
    host = ModelHost(config, lambda _: engine, metrics, served)
    generation = Generation(server, (host,), MemoryStore(), work, metrics)
    running = asyncio.create_task(generation.run())
    await host.engine.wait_until_ready()

    async def ask(prompt: str, sampling: Sampling) -> tuple[int, ...]:
        request = Request("/v1/completions", "tiny", (Text(prompt),), sampling)
        stream = await generation.open(request)
        token_ids: list[int] = []
        async with stream.audience.reader() as events:
            async for event in events:
                events.sent(event)
                if isinstance(event, Tokens):
                    token_ids += event.ids
        assert isinstance(event, Finish)
        return tuple(token_ids)

    try:
        yield generation, ask
    finally:
        await engine.close()
        await running


@pytest.mark.parametrize(
    "sampling",
    [pytest.param(GREEDY, marks=pytest.mark.slow), SEEDED],
    ids=["greedy", "seeded"],
)
async def test_64_at_once_say_what_each_says_alone(folder: Path, sampling: Sampling) -> None:
    async with asking(folder, max_num_seqs=16) as (generation, ask):
        alone = [await ask(prompt, sampling) for prompt in PROMPTS]
        together = await asyncio.gather(*(ask(prompt, sampling) for prompt in PROMPTS))
        assert together == alone
        await at_rest(generation)


async def at_rest(generation: Generation) -> None:
    """Until the books are empty: no stream, no sequence, every block free."""
    async with asyncio.timeout(10):
        host = generation.fleet.hosts.first
        # The engine reports its status four times a second, so the last one may still be old.
        while (
            host.engine.status is None
            or host.engine.status.num_running
            or host.engine.status.num_waiting
            or len(generation.streams)
        ):
            await asyncio.sleep(0.01)
    ready = host.model.ready
    assert ready is not None
    assert host.engine.status.blocks_free == ready.layout.num_blocks


def test_the_cap_of_a_step_changes_no_token(folder: Path) -> None:
    async def tokens(cap: int) -> list[tuple[int, ...]]:
        async with asking(folder, max_step_tokens=cap) as (_, ask):
            return list(await asyncio.gather(*(ask(p, GREEDY) for p in PROMPTS[:6])))

    whole = asyncio.run(tokens(512))
    for cap in (1, 4, 16, 64):
        assert asyncio.run(tokens(cap)) == whole, cap


async def test_a_client_that_leaves_frees_what_it_held(folder: Path) -> None:
    async with asking(folder) as (generation, _):
        endless = Sampling(temperature=0, max_tokens=400, ignore_eos=True)
        request = Request("/v1/completions", "tiny", (Text("on and on"),), endless)
        stream = await generation.open(request)
        async with stream.audience.reader() as events:
            async for event in events:
                events.sent(event)
                if isinstance(event, Tokens):
                    break
        await at_rest(generation)


def test_a_prompt_that_several_steps_compute_tells_each(folder: Path) -> None:
    async def run() -> list[int]:
        async with asking(folder, max_step_tokens=32) as (generation, _):
            request = Request("/v1/completions", "tiny", (Text("x" * 100),), GREEDY)
            stream = await generation.open(request)
            async with stream.audience.reader() as events:
                return [e.processed async for e in events if isinstance(e, Progress)]

    processed = asyncio.run(run())
    assert processed[0] == 0 and processed[-1] == 100
    assert len(processed) >= 5 and processed == sorted(set(processed))
