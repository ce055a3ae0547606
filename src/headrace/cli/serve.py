"""`headrace serve`: puts gateway, generation and engine together, and takes them down again."""

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import sys
import threading

import msgspec

from headrace.cli import exits
from headrace.cli.download import DownloadLine
from headrace.cli.state import streams_folder
from headrace.core.config import ServerConfig
from headrace.core.errors import HeadraceError
from headrace.core.messages import Ready
from headrace.engine.supervisor import Supervisor
from headrace.gateway.app import create_app
from headrace.gateway.auth import Auth
from headrace.gateway.http_server import HttpServer, LoadingServer
from headrace.generation.generation import Generation
from headrace.generation.served import ServedModel
from headrace.generation.work import WorkerPool
from headrace.streams.memory_store import MemoryStore
from headrace.streams.sqlite_store import SqliteStore
from headrace.streams.state_dir import StateError, StateInUse
from headrace.streams.store import Store

logger = logging.getLogger(__name__)

_KEEP_ALIVE_S = 75
_FAREWELL_S = 5  # for last words to clients that read slowly
_LAST_S = 25.0  # for all that follows the drain; farewell, engine and store take less


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
        with LoadingServer(listener, DownloadLine(config.models[0].model)) as room:
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
        await store.close()


def _open_store(state_dir: str | None, port: int) -> Store:
    folder = streams_folder(state_dir, port)
    return MemoryStore() if folder is None else SqliteStore.open(folder)


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
    """One server from start to end. Signals and lost threads set events, `_serve` acts."""

    def __init__(
        self, config: ServerConfig, model: ServedModel, listener: socket.socket, store: Store
    ) -> None:
        self._config = config
        self._store = store
        self._model = model
        self._listener = listener
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._lost_thread = asyncio.Event()

    async def run(self) -> int:
        self._watch_signals()
        self._watch_threads()
        local = msgspec.structs.replace(self._config.models[0], model=str(self._model.folder))
        engine = Supervisor(local, self._config.streams.load_timeout_s)
        named = msgspec.structs.replace(local, served_model_name=self._model.names)
        work = WorkerPool("headrace.protocols.worker", msgspec.msgpack.encode(named))
        generation = Generation(self._config, self._model, engine, self._store, work)
        try:
            return await self._serve(generation, engine)
        except ExceptionGroup as broken:
            logger.critical("A part of the server has failed", exc_info=broken)
            _say("headrace: a part of the server has failed, so all of it ends; start it again.")
            _end_within(_LAST_S, exits.BROKEN)
            return exits.BROKEN
        finally:
            await engine.close()

    async def _serve(self, generation: Generation, engine: Supervisor) -> int:
        """Until a signal or the engine's end; an ExceptionGroup if anything else ends first."""
        server = HttpServer(create_app(generation, self._config), _KEEP_ALIVE_S, _FAREWELL_S)
        async with asyncio.TaskGroup() as tasks:
            generating = tasks.create_task(generation.run(), name="generation")
            http = tasks.create_task(server.serve(sockets=[self._listener]), name="http")
            announcing = tasks.create_task(self._announce(generation), name="announce")
            await _first(self._stop, self._lost_thread, generation.died, generating, http)
            if self._stop.is_set():
                draining = tasks.create_task(self._drain(generation), name="drain")
                await _first(self._hurry, draining)
                draining.cancel()
            elif not generation.died.is_set():
                raise HeadraceError("generation, http or a thread ended unasked")
            code = self._verdict(generation)
            _end_within(_LAST_S, code)
            announcing.cancel()
            server.should_exit = True
            await engine.close()
        return code

    async def _drain(self, generation: Generation) -> None:
        seconds = self._config.streams.drain_s
        if number := len(generation.streams):
            streams = "1 stream has" if number == 1 else f"{number} streams have"
            _say(f"headrace: {streams} up to {seconds:g} s to end; Ctrl-C again ends at once.")
        await generation.drain(seconds)

    def _watch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup
                loop.add_signal_handler(number, self._on_signal)

    def _watch_threads(self) -> None:
        """A thread that fails, as the one that writes the store, is as bad as a lost task."""
        loop = asyncio.get_running_loop()

        def on_failure(lost: threading.ExceptHookArgs) -> None:
            threading.__excepthook__(lost)
            with contextlib.suppress(RuntimeError):  # the loop has ended before
                loop.call_soon_threadsafe(self._lost_thread.set)

        threading.excepthook = on_failure

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._hurry.set()
        self._stop.set()

    async def _announce(self, generation: Generation) -> None:
        """One line once the model answers; before that, a warning if anybody may ask."""
        http = self._config.http
        if Auth(http).is_open_to_all:
            _say(
                f"headrace: {http.host} serves other machines, and no key is asked for; give one "
                "with HEADRACE_API_KEYS or --api-key-file."
            )
        ready = await generation.wait_until_ready()
        host, port = self._listener.getsockname()[:2]
        _say(_ready_line(f"http://{host}:{port}", self._model.names[0], ready))

    def _verdict(self, generation: Generation) -> int:
        if not generation.died.is_set():
            return exits.DONE
        _say(f"headrace: {generation.last_words}")
        return exits.ENGINE if self._model.ready else exits.MODEL


def _ready_line(url: str, name: str, ready: Ready) -> str:
    target = "off" if ready.max_stall_s is None else f"{1000 * ready.max_stall_s:g} ms"
    seqs = f"{ready.max_num_seqs} stream{'s' * (ready.max_num_seqs > 1)} at once"
    return (
        f"Headrace is ready at {url}: {name}, lane {ready.lane}, {ready.device} {ready.dtype}, "
        f"kernels {ready.kernels} ({ready.kernels_reason}), context {ready.max_model_len}, "
        f"{seqs}, stall target {target}"
    )


def _say(line: str) -> None:
    """To stderr, which may be closed."""
    with contextlib.suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def _end_within(seconds: float, code: int) -> None:
    """Ends the process even if something keeps it from ending by itself."""
    timer = threading.Timer(seconds, os._exit, (code,))
    timer.daemon = True
    timer.start()


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
