"""`headrace serve`: puts gateway, generation and engine together, and takes them down again."""

import asyncio
import errno
import logging
import os
import signal
import socket
import sys
from pathlib import Path

import msgspec
import uvicorn

from headrace.cli import exits
from headrace.cli.download import DownloadLine
from headrace.core.config import ServerConfig
from headrace.core.messages import Ready
from headrace.engine.supervisor import Supervisor
from headrace.gateway.app import create_app
from headrace.gateway.http_server import HttpServer
from headrace.gateway.waiting_room import WaitingRoom
from headrace.generation.generation import Generation
from headrace.generation.served import ServedModel
from headrace.streams.memory_store import MemoryStore
from headrace.streams.sqlite_store import SqliteStore
from headrace.streams.state_dir import StateError, StateInUse
from headrace.streams.store import Store

_KEEP_ALIVE_S = 75
_FAREWELL_S = 5  # for last words to clients that read slowly


def serve(config: ServerConfig) -> int:
    """Serves until a signal; returns the exit code."""
    logging.basicConfig(
        level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        listener = _listen(config.http.host, config.http.port)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        print(
            f"headrace: port {config.http.port} is in use; stop what uses it, or give --port.",
            file=sys.stderr,
        )
        return exits.IN_USE
    with listener:
        with WaitingRoom(listener, DownloadLine(config.models[0].model)) as room:
            model = ServedModel(config.models[0], room)
        with asyncio.Runner(loop_factory=_new_loop) as runner:
            return runner.run(_run(config, model, listener))


async def _run(config: ServerConfig, model: ServedModel, listener: socket.socket) -> int:
    try:
        store = _open_store(config.streams.state_dir, listener.getsockname()[1])
    except StateError as error:
        print(f"headrace: {error}", file=sys.stderr)
        return exits.IN_USE if isinstance(error, StateInUse) else exits.FAILED
    try:
        return await _Serving(config, model, listener, store).run()
    finally:
        if isinstance(store, SqliteStore):
            await store.close()


def _open_store(state_dir: str | None, port: int) -> SqliteStore | MemoryStore:
    if state_dir == "none":
        return MemoryStore()
    if state_dir is not None:
        return SqliteStore.open(Path(state_dir))
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return SqliteStore.open(Path(home) / "headrace" / str(port))


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=2048)


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


class _Serving:
    """One server from start to end. Signals set an event, `run` acts."""

    def __init__(
        self, config: ServerConfig, model: ServedModel, listener: socket.socket, store: Store
    ) -> None:
        self._config = config
        self._store = store
        self._model = model
        self._listener = listener
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        local = msgspec.structs.replace(self._config.models[0], model=str(self._model.folder))
        engine = Supervisor(local, self._config.streams.load_timeout_s)
        generation = Generation(self._config, self._model, engine, self._store)
        server = self._make_server(generation)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(generation.run(), name="generation")
            tasks.create_task(server.serve(sockets=[self._listener]), name="http")
            announcing = tasks.create_task(self._announce(generation), name="announce")
            await _first(self._stop, generation.died)
            draining = asyncio.create_task(generation.drain(self._config.streams.drain_s))
            await _first(self._hurry, draining)
            draining.cancel()
            announcing.cancel()
            server.should_exit = True
            await engine.close()
        return self._verdict(generation)

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    def _make_server(self, generation: Generation) -> HttpServer:
        return HttpServer(
            uvicorn.Config(
                create_app(generation, self._config),
                log_level="warning",
                access_log=False,
                lifespan="off",
                timeout_keep_alive=_KEEP_ALIVE_S,
                timeout_graceful_shutdown=_FAREWELL_S,
                server_header=False,
            )
        )

    async def _announce(self, generation: Generation) -> None:
        """One line once the model answers."""
        ready = await generation.wait_until_ready()
        host, port = self._listener.getsockname()[:2]
        print(_ready_line(f"http://{host}:{port}", self._model.names[0], ready), file=sys.stderr)

    def _verdict(self, generation: Generation) -> int:
        if not generation.died.is_set():
            return exits.DONE
        print(f"headrace: {generation.last_words}", file=sys.stderr)
        return exits.ENGINE if self._model.ready else exits.MODEL


def _ready_line(url: str, name: str, ready: Ready) -> str:
    return (
        f"Headrace is ready at {url}: {name}, lane {ready.lane}, {ready.device} {ready.dtype}, "
        f"context {ready.max_model_len}, {ready.max_num_seqs} streams at once"
    )


async def _first(*things: "asyncio.Event | asyncio.Task[None]") -> None:
    """Waits until one of them has happened."""
    waits = [
        thing if isinstance(thing, asyncio.Task) else asyncio.create_task(thing.wait())
        for thing in things
    ]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for thing, wait in zip(things, waits, strict=True):
        if wait is not thing:
            wait.cancel()
