"""Tests that two keys on one engine cannot detect each other's prompts."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx
from starlette.datastructures import Headers

from headrace.engines.local import LocalEngine
from headrace.fleet.model_host import ModelHost
from headrace.fleet.served_model import ServedModel
from headrace.gateway.auth import Auth
from headrace.generation.generation import Generation
from headrace.metrics.metrics import Metrics
from headrace.protocols.worker import Jobs
from headrace.streams.stores.memory import MemoryStore
from headrace.workers.pool import ThreadJobRunner
from headrace_common.config.settings import HttpConfig, ModelConfig, ServerConfig
from tests.gateway.builders import app_of

PROMPT = "The figures of the third quarter are not to be known before Monday. " * 4
Cached = Callable[..., Awaitable[int]]


@contextlib.asynccontextmanager
async def serving(folder: Path, *keys: str) -> AsyncIterator[Cached]:
    """Yield a function that sends the prompt and returns its number of cached tokens."""
    model = ModelConfig(model=str(folder), threads=1, max_model_len=512)
    config = ServerConfig(models=(model,), http=HttpConfig(api_key=keys))
    engine, _ = await LocalEngine.start(model)
    served = ServedModel(model)
    work = ThreadJobRunner(Jobs(served))
    metrics = Metrics()
    host = ModelHost(model, lambda _: engine, metrics, served)
    generation = Generation(config, (host,), MemoryStore(), work, metrics)
    transport = httpx.ASGITransport(app_of(generation, config))

    async def cached(key: str = "", **fields: str) -> int:
        body, headers = {"prompt": PROMPT, "max_tokens": 1, **fields}, {"X-Api-Key": key}
        answer = await client.post("/v1/completions", json=body, headers=headers)
        found: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(generation.run())
        await host.engine.wait_until_ready()
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            yield cached
        await engine.close()


async def test_cached_tokens_do_not_reveal_the_prompts_of_another_key(folder: Path) -> None:
    async with serving(folder, "ann", "bob") as cached:
        assert await cached("ann") == 0
        assert await cached("bob") == 0
        assert await cached("ann") > 200


async def test_no_cache_salt_reaches_the_cache_of_another_key(folder: Path) -> None:
    ann = Auth(HttpConfig(api_key=("ann",))).owner(Headers({"X-Api-Key": "ann"}))
    async with serving(folder, "ann", "bob") as cached:
        await cached("ann", cache_salt="a")
        for salt in ("a", f"{ann}\na", f"\n{ann}\na", f"{ann}a"):
            assert await cached("bob", cache_salt=salt) == 0
        assert await cached("ann", cache_salt="a") > 200


async def test_without_keys_all_clients_share_a_cache_per_salt(folder: Path) -> None:
    async with serving(folder) as cached:
        assert await cached("ann") == 0
        assert await cached("bob") > 200
        assert await cached("bob", cache_salt="a") == 0
