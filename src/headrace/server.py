"""Builds all parts of a server except its engines, and runs the parts.

The caller provides engines, stores, files and HTTP, so that a simulation can pass simulated parts.
"""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

import msgspec
from starlette.applications import Starlette

from headrace.batches.answers import LineAnswers
from headrace.batches.batches import Batches
from headrace.batches.store import BatchStore
from headrace.fleet.model_host import CACHE_BYTES, FILES, ModelFiles, ModelHost, Start
from headrace.fleet.model_list import ModelChanges, ModelSources
from headrace.fleet.served_model import ServedModel
from headrace.gateway.adapter_routes import AdapterRoutes
from headrace.gateway.app import create_app
from headrace.gateway.auth import Auth
from headrace.gateway.batch_routes import BatchRoutes
from headrace.gateway.body_index import BodyIndex
from headrace.gateway.byte_routes import ByteRoutes
from headrace.gateway.conversation_routes import ConversationRoutes
from headrace.gateway.durable_routes import DurableRoutes
from headrace.gateway.file_routes import FileRoutes
from headrace.gateway.generation_routes import GenerationRoutes, TextRoutes
from headrace.gateway.llama_routes import LlamaRoutes
from headrace.gateway.lm_studio_routes import LmStudioRoutes
from headrace.gateway.message_batch_routes import MessageBatchRoutes
from headrace.gateway.model_routes import ModelRoutes
from headrace.gateway.native_routes import NativeRoutes
from headrace.gateway.ollama_routes import OllamaRoutes
from headrace.gateway.realtime import RealtimeSockets
from headrace.gateway.request_bodies import Bodies
from headrace.gateway.responses_routes import ResponsesRoutes
from headrace.gateway.responses_socket import ResponseSockets
from headrace.gateway.routes import Endpoints
from headrace.gateway.state_routes import ManageRoutes, StateRoutes
from headrace.gateway.vector_routes import VectorRoutes
from headrace.generation.generation import Generation
from headrace.intake.intake import Intake
from headrace.metrics.metrics import Metrics
from headrace.streams.store import Store
from headrace.text.model_names import settled_aliases, with_unique_names
from headrace.workers.pool import Begin, WorkerPool
from headrace.workers.process import WorkerProcess
from headrace_common.config.settings import ModelConfig, ServerConfig
from headrace_common.errors import HeadraceError
from headrace_common.system.race import race


class Server(NamedTuple):
    """Holds the parts of a server that the caller has to run; `app` answers while they run."""

    generation: Generation
    batches: Batches
    app: Starlette


def build_server(
    config: ServerConfig,
    sources: ModelSources,
    model: ServedModel | None,
    start: Start,
    store: Store,
    batch_store: BatchStore,
    auth: Auth,
    metrics: Metrics,
    begin_worker: Begin = WorkerProcess.begin,
    files: ModelFiles = FILES,
) -> Server:
    """Build a server for the models in `sources`.

    `model` is given if the server has one model and that model was already read; `metrics` then
    also counts the model's requests. `start` starts an engine, `begin_worker` a worker process.
    `files` fetches and reads models.
    `store` holds the streams, `batch_store` the files and batches.
    """
    cache_bytes = None if config.loading.models_memory_bytes is None else CACHE_BYTES

    def make_host(one: ModelConfig) -> ModelHost:
        if model is not None and one.model == config.models[0].model:
            return ModelHost(one, start, metrics, model, files=files)
        return ModelHost(one, start, Metrics(), cache_bytes=cache_bytes, files=files)

    configs = sources.all()
    aliases = settled_aliases(config.alias, (*with_unique_names(config.models), *configs))
    config = msgspec.structs.replace(config, alias=aliases)
    hosts = tuple(map(make_host, configs))
    known = functools.partial(_known_to_workers, aliases=aliases)
    has_keys = auth.num_keys > 0
    workers = WorkerPool("headrace.protocols.worker", *known(hosts), has_keys, begin_worker)
    changes = ModelChanges(sources, make_host, lambda hosts: workers.renew(*known(hosts)))
    generation = Generation(config, hosts, store, workers, metrics, changes)
    return build_gateway(generation, config, batch_store, auth)


def build_gateway(
    generation: Generation, config: ServerConfig, batch_store: BatchStore, auth: Auth
) -> Server:
    """Build the parts between `generation` and the clients."""
    workers, http = generation.work, config.http
    intake, index = Intake(generation, config), BodyIndex()
    batches = Batches(batch_store, config, workers, LineAnswers(generation, intake))
    bodies, operator_bodies = (
        Bodies(http.max_body_bytes, http.body_timeout_s, auth.check_simple) for _ in range(2)
    )
    generation_routes = GenerationRoutes(generation, intake, config, auth, bodies)
    endpoints = Endpoints(
        states=StateRoutes(generation, http),
        management=ManageRoutes(generation),
        models=ModelRoutes(generation, bodies),
        configured=ModelRoutes(generation, operator_bodies),
        adapters=AdapterRoutes(generation, operator_bodies),
        generation=generation_routes,
        vectors=VectorRoutes(generation, intake, auth, bodies),
        texts=TextRoutes(generation, intake, bodies),
        responses=ResponsesRoutes(generation, intake, config, auth, bodies),
        conversations=ConversationRoutes(intake.conversations, auth, bodies),
        streams=NativeRoutes(generation, intake.conversations, config, auth, index),
        stream_bytes=ByteRoutes(generation, config, auth, bodies, index),
        durable=DurableRoutes(generation, auth, config.streams.heartbeat_s),
        llama=LlamaRoutes(generation, auth),
        ollama=OllamaRoutes(generation, generation_routes, auth, bodies),
        lm_studio=LmStudioRoutes(generation.fleet),
        files=FileRoutes(batches, batch_store.blobs, auth, http.body_timeout_s),
        batches=BatchRoutes(batches, workers, auth, bodies),
        message_batches=MessageBatchRoutes(
            batches, batch_store, intake, auth, bodies, http.api_prefix
        ),
        sockets=RealtimeSockets(generation, config.streams, auth, bodies, intake),
        response_sockets=ResponseSockets(generation, config.streams, auth, bodies, intake),
        prefix=http.api_prefix,
    )
    return Server(generation, batches, create_app(endpoints, http, auth, generation.metrics))


class Signals:
    """Tells a running server to stop. A second `stop` skips the drain."""

    def __init__(self) -> None:
        self.has_stopped = asyncio.Event()
        self.is_in_hurry = asyncio.Event()
        # Set when a thread of the server has failed.
        self.lost_thread = asyncio.Event()

    def stop(self) -> None:
        if self.has_stopped.is_set():
            self.is_in_hurry.set()
        self.has_stopped.set()


async def run_server(
    server: Server,
    serving: Coroutine[Any, Any, None],
    signals: Signals,
    drain: Callable[[Generation], Coroutine[Any, Any, None]],
    ends: Callable[[], None],
) -> None:
    """Run all parts until a signal arrives or the engine ends; then stop the parts in order.

    `serving` runs the HTTP server. After a signal, `drain` gives the running streams time to end.
    Then `ends` must make the HTTP server stop. If a part ends unexpectedly, raise ExceptionGroup.
    """
    generation = server.generation
    async with asyncio.TaskGroup() as tasks:
        works = (
            tasks.create_task(generation.run(), name="generation"),
            tasks.create_task(serving, name="http"),
            batching := tasks.create_task(server.batches.run(), name="batches"),
        )
        await _first(signals.has_stopped, signals.lost_thread, generation.died, *works)
        if signals.has_stopped.is_set():
            draining = tasks.create_task(drain(generation), name="drain")
            await _first(signals.is_in_hurry, draining)
            draining.cancel()
        elif not generation.died.is_set():
            raise HeadraceError("Generation, HTTP or a thread ended unexpectedly.")
        ends()
        batching.cancel()
        await generation.fleet.close()


async def _first(*things: "asyncio.Event | asyncio.Future[None]") -> None:
    """Wait until one of the events is set or one of the futures is done."""
    async with race(*(it.wait() if isinstance(it, asyncio.Event) else it for it in things)):
        pass


def _known_to_workers(hosts: tuple[ModelHost, ...], aliases: tuple[str, ...]) -> tuple[bytes, bool]:
    """Return the encoded models for workers, and whether images need a separate worker."""
    # For a model that was already read, workers get the local folder, so they do not ask the model
    # hub again. If clients may name a model by its path, the path is kept.
    known = [
        host.local
        if host.known and not host.paths
        else msgspec.structs.replace(host.config, adapter=host.adapters)
        for host in hosts
    ]
    return msgspec.msgpack.encode((known, aliases)), any(host.may_see_images for host in hosts)
