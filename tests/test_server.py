"""Tests building the parts of a server as `headrace serve` does."""

import asyncio
import threading
from pathlib import Path

import httpx

from headrace.batches.folder import folder_batch_store
from headrace.engines.client import EngineClient
from headrace.fleet.model_list import ModelSources
from headrace.fleet.pulls import Pulls
from headrace.gateway.auth import Auth
from headrace.metrics.metrics import Metrics
from headrace.server import build_server
from headrace.streams.stores.memory import MemoryStore
from headrace_common.config.settings import ModelConfig, ServerConfig


async def test_a_server_is_built_without_a_task_a_thread_or_an_engine_and_answers(
    tmp_path: Path,
) -> None:
    configs = tuple(ModelConfig(model="headrace-mini", served_model_name=(it,)) for it in "ab")
    config = ServerConfig(models=configs)
    sources = ModelSources(configs, Pulls(None), lambda: configs, None, is_one=False)

    def start(model: ModelConfig) -> EngineClient:
        raise AssertionError("nobody has asked for a model")

    tasks, threads = asyncio.all_tasks(), threading.enumerate()
    parts = (start, MemoryStore(), folder_batch_store(tmp_path), Auth(config.http), Metrics())
    server = build_server(config, sources, None, *parts)
    assert asyncio.all_tasks() == tasks
    assert threading.enumerate() == threads
    transport = httpx.ASGITransport(server.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        listed = (await client.get("/v1/models")).json()
    assert [it["id"] for it in listed["data"]] == ["a", "b"]
