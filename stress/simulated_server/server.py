"""A server inside the simulated system, from its start to its stop or its death."""

import asyncio
import errno
import itertools
import os
import time
from collections.abc import Callable
from contextvars import Context, copy_context
from functools import partial
from pathlib import Path

from detangle import uniform
from detangle._context import current_host
from starlette.applications import Starlette

from headrace.batches.folder import folder_batch_store
from headrace.batches.redis_store import redis_batch_store
from headrace.batches.store import BatchStore
from headrace.engines.client import EngineClient
from headrace.engines.supervisor import Supervisor
from headrace.fleet.fleet import pinned_model
from headrace.fleet.model_host import ModelFiles
from headrace.fleet.model_list import ModelSources, kept
from headrace.fleet.pulls import Pulls
from headrace.fleet.replicas import Replicas, between
from headrace.fleet.served_model import ServedModel
from headrace.gateway.auth import Auth
from headrace.generation.generation import Generation
from headrace.metrics.metrics import Metrics
from headrace.server import Signals, build_server, run_server
from headrace.streams.store import Store
from headrace.streams.stores.redis import RedisStore
from headrace.streams.stores.sqlite import SqliteStore
from headrace_common.config.settings import ModelConfig, ServerConfig
from stress.simulated_server.disk import Disk
from stress.simulated_server.downloads import Hub
from stress.simulated_server.faults import Faults
from stress.simulated_server.processes import OnEngine, SimChild, SimWorker
from stress.simulated_server.system import PROCESS, Process
from stress.simulated_server.traces import SimTraces

FAREWELL_S = 5.0


class Machine:
    """The computer of a server: its disk outlives the server's processes.

    With `redis`, the address of a Redis, the server stores its streams there. `on_engine` is
    called at the start of each engine.
    """

    def __init__(
        self,
        folder: Path,
        config: ServerConfig,
        model: ServedModel,
        faults: Faults,
        name: str = "server",
        redis: str = "",
        on_engine: OnEngine = lambda engine: None,
    ) -> None:
        self._folder, self.config, self._faults = folder, config, faults
        self._on_engine = on_engine
        self.hub = Hub(folder / f"hub of {name}", model, faults)
        self.name, self.redis = name, redis
        self._numbers = itertools.count()
        self.storage = Disk(self._next_disk(), faults)
        self.server: SimServer | None = None
        # Set at the next start of a server.
        self.starts = asyncio.Event()

    @property
    def disk(self) -> Path:
        """The folder of the running server's files."""
        return self.storage.folder

    def start(self) -> "SimServer":
        """Start a server process; it runs until it stops or is killed."""
        if self.server is not None and not self.server.process.is_dead:
            # The end of a process also ends threads that a stopped server did not wait for.
            self.kill()
        process = Process(f"{self.name} {next(self._numbers)}")
        token, host = PROCESS.set(process), current_host.set(self.name)
        try:
            self.server = SimServer(
                process,
                self.disk,
                self.config,
                self.hub,
                self._faults,
                self.redis,
                self._on_engine,
            )
        finally:
            PROCESS.reset(token)
            current_host.reset(host)
        self.starts.set()
        self.starts = asyncio.Event()
        return self.server

    def kill(self) -> None:
        """End the server and all processes that it started, without a chance to clean up.

        The next server gets a copy of the files, because the dead one still has them open.
        """
        self._end_server()
        self.storage.after_kill(self._next_disk())

    def cut_power(self) -> None:
        """End all processes. The next server gets what the disk has synced."""
        self._end_server()
        self.storage.after_power_cut(self._next_disk())

    def _end_server(self) -> None:
        assert self.server is not None
        self.server.process.kill()
        self.server.has_ended.set()

    def _next_disk(self) -> Path:
        return self._folder / f"disk{next(self._numbers)}"


class SimServer:
    """One server process. `app` is set once the server accepts requests."""

    def __init__(
        self,
        process: Process,
        disk: Path,
        config: ServerConfig,
        hub: Hub,
        faults: Faults,
        redis: str = "",
        on_engine: OnEngine = lambda engine: None,
    ) -> None:
        self.process = process
        self.context: Context = copy_context()
        self.app: Starlette | None = None
        self.generation: Generation
        self.store: Store
        # The tasks of open requests, in the order of their arrival.
        self.requests: dict[asyncio.Task[None], None] = {}
        # Each of these tells an open WebSocket that the server ends.
        self.farewells: list[Callable[[], None]] = []
        self.auth: Auth
        self.accepts = asyncio.Event()
        self.has_ended = asyncio.Event()
        self.error: BaseException | None = None
        self.config = config
        self._disk, self._config, self._hub, self._faults = disk, config, hub, faults
        self._on_engine = on_engine
        self._redis = redis
        self._children: list[SimChild] = []
        self._signals = Signals()
        self.task = asyncio.create_task(self._run(), name=process.name)

    def stop(self) -> None:
        """Do what a signal does; a second call skips the drain."""
        self._signals.stop()

    def engines(self) -> list[SimChild]:
        """Return the running engine processes."""
        return [child for child in self._children if child.is_running]

    async def _run(self) -> None:
        try:
            await self._serve()
        except BaseException as error:
            self.error = error
            raise
        finally:
            self.app = None
            self.has_ended.set()

    async def _serve(self) -> None:
        store, batch_store = await self._open_stores()
        self.store = store
        try:
            metrics, config = Metrics(SimTraces()), self._config
            self.auth = Auth(config.http)
            pinned = pinned_model(config)
            server = build_server(
                config,
                self._sources(),
                None if pinned is None else self._hub.model(pinned),
                self._start,
                store,
                batch_store,
                self.auth,
                metrics,
                partial(SimWorker.begin, faults=self._faults),  # type: ignore[arg-type]
                ModelFiles(self._hub.fetch, self._read),
            )
            self.generation = generation = server.generation
            http = SimHttp(self, server.app)
            try:
                await run_server(server, http.serve(), self._signals, self._drain, http.stop)
            finally:
                await generation.fleet.close()
        finally:
            await store.close()

    async def _open_stores(self) -> tuple[Store, BatchStore]:
        if self._redis:
            store = await RedisStore.open(self._redis)
            return store, redis_batch_store(store)
        return SqliteStore.open(self._disk), folder_batch_store(self._disk / "batches")

    def _sources(self) -> ModelSources:
        """Return the models to serve, as `headrace serve` does."""
        config, is_one = self._config, pinned_model(self._config) is not None
        file = None if is_one else self._disk / "desired.json"
        configs = (file and kept(file)) or config.models
        pulls = Pulls(self._disk / "pulled.json", self._hub.begin)  # type: ignore[arg-type]
        return ModelSources(configs, pulls, lambda: config.models, file, is_one)

    def _read(self, config: ModelConfig, path: str) -> ServedModel:
        """Read a model in a thread. The disk may be slow or damaged."""
        if self._faults.hits("disk: slow read of a model"):
            time.sleep(uniform(0.5, 10.0))
        if self._faults.hits("disk: model cannot be read"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return self._hub.read(config, path)

    async def _drain(self, generation: Generation) -> None:
        await generation.drain(self._config.streams.drain_s)

    def _start(self, model: ModelConfig) -> EngineClient:
        timeout_s = self._config.streams.load_timeout_s
        start_one = partial(Supervisor, model, timeout_s, spawn=self._spawn)  # type: ignore[arg-type]
        if model.replicas == 1:
            return start_one()
        return Replicas(start_one, *between(model), self._config.loading.idle_unload_s)

    async def _spawn(self, number: int, lock_fds: tuple[int, ...]) -> SimChild:
        child = await SimChild.spawn(self._faults, self._on_engine)
        self._children = [*self.engines(), child]
        return child


class SimHttp:
    """A simulated `HttpServer`, which accepts requests until `stop` is called."""

    def __init__(self, server: SimServer, app: Starlette) -> None:
        self._has_stopped = False
        self._server, self._app = server, app

    def stop(self) -> None:
        self._has_stopped = True

    async def serve(self) -> None:
        """Accept requests. At the end, do what uvicorn does: wait for them, then cancel them."""
        server = self._server
        server.app = self._app
        server.accepts.set()
        # uvicorn also looks ten times a second.
        while not self._has_stopped:
            await asyncio.sleep(0.1)
        server.app = None
        for say_farewell in server.farewells:
            say_farewell()
        if server.requests:
            await asyncio.wait([*server.requests], timeout=FAREWELL_S)
        for task in server.requests:
            task.cancel()
        if server.requests:
            await asyncio.wait([*server.requests])
