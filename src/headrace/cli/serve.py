"""`headrace serve`: puts gateway, generation and engine together, and takes them down again."""

import asyncio
import contextlib
import errno
import functools
import itertools
import logging
import os
import signal
import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from headrace.batches.folder import folder_shelf, temporary_shelf
from headrace.batches.shelf import Shelf
from headrace.cli import exits
from headrace.cli.listener import address_of, listen, no_listener
from headrace.cli.load_lines import LoadLines
from headrace.cli.logs import printable, say
from headrace.cli.state import is_redis, streams_folder
from headrace.engines.client import EngineClient
from headrace.engines.supervisor import Supervisor
from headrace.fleet.fetch_apart import fetch_apart
from headrace.fleet.fleet import pinned_model
from headrace.fleet.model_check import read_checked
from headrace.fleet.model_host import CACHE_BYTES, ModelHost, Start
from headrace.fleet.model_list import Desired, ModelSources, kept
from headrace.fleet.pulls import Pulls
from headrace.fleet.replicas import Replicas, between
from headrace.fleet.served_model import ServedModel
from headrace.gateway.app import create_app
from headrace.gateway.auth import Auth
from headrace.gateway.figure_routes import about
from headrace.gateway.http_server import (
    Bounds,
    HttpServer,
    raise_descriptors,
)
from headrace.gateway.loading_server import LoadingServer
from headrace.gateway.realtime import ENVELOPE_BYTES
from headrace.generation.generation import Generation
from headrace.metrics.metrics import Metrics
from headrace.metrics.otlp import open_traces
from headrace.metrics.traces import Traces
from headrace.streams.store import Store
from headrace.streams.stores.memory import MemoryStore
from headrace.streams.stores.sqlite import SqliteStore
from headrace.streams.stores.state_dir import StateError, StateInUse
from headrace.text.model_names import settled_aliases, told_apart
from headrace.workers.pool import WorkerPool
from headrace_common.config.document import reread_folder
from headrace_common.config.settings import HttpConfig, ModelConfig, ServerConfig
from headrace_common.config.sources import check_names
from headrace_common.errors import ConfigError, HeadraceError
from headrace_common.loading import READING
from headrace_common.messages import Ready
from headrace_common.system.core_lock import open_core_lock
from headrace_common.system.race import race
from headrace_common.version import __version__
from headrace_common.without_engine import WITHOUT_ENGINE, has_engine

logger = logging.getLogger(__name__)

_KEEP_ALIVE_S = 75
_FAREWELL_S = 5  # for last words to clients that read slowly
_LAST_S = 25.0  # for all that follows the drain; farewell, engine and store take less


def serve(config: ServerConfig, lines: LoadLines) -> int:
    """Serves until a signal; returns the exit code. `lines` show what loads do."""
    if config.cluster is None and not has_engine():
        raise ConfigError(WITHOUT_ENGINE)
    check_names(told_apart(config.models))
    raise_descriptors(config.http.max_connections)
    tls = _tls(config.http)
    traces = open_traces(config.otlp_endpoint, os.environ, __version__)
    if config.cluster is not None:
        from headrace.engines.ray_engine import connect

        connect(config.cluster)
    try:
        listener = listen(config.http)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise no_listener(config.http, error) from None
        say(f"headrace: port {config.http.port} is in use; stop what uses it, or give --port.")
        return exits.IN_USE
    with listener:
        model = None
        if (pinned := pinned_model(config)) is not None:
            if config.alias:  # report a mistyped one before a download
                settled_aliases(config.alias, _sources(config, listener).all())
            lines.watch.begin(READING)
            with LoadingServer(listener, lines.watch, tls, config.http.api_prefix) as room:
                model = read_checked(pinned, fetch_apart(pinned, room))
        with asyncio.Runner(loop_factory=_new_loop) as runner:
            return runner.run(_run(config, model, listener, tls, lines, traces))


async def _run(
    config: ServerConfig,
    model: ServedModel | None,
    listener: socket.socket,
    tls: ssl.SSLContext | None,
    lines: LoadLines,
    traces: Traces,
) -> int:
    try:
        store = await _open_store(config.streams.state_dir, listener.getsockname()[1])
    except StateError as error:
        say(f"headrace: {error}")
        return exits.IN_USE if isinstance(error, StateInUse) else exits.FAILED
    try:
        return await _Serving(config, model, listener, store, tls).run(lines, traces)
    finally:
        await store.close()


async def _open_store(state_dir: str | None, port: int) -> Store:
    if state_dir is not None and is_redis(state_dir):
        return await _open_redis(state_dir)
    folder = streams_folder(state_dir, port)
    return MemoryStore() if folder is None else SqliteStore.open(folder)


async def _open_redis(url: str) -> Store:
    try:
        from headrace.streams.stores.redis import RedisStore
    except ModuleNotFoundError as missing:
        raise StateError(
            "--state-dir redis://… needs the redis package: pip install 'headrace[redis]'."
        ) from missing
    return await RedisStore.open(url)


def _tls(http: HttpConfig) -> ssl.SSLContext | None:
    """The TLS context, if HTTPS is served; ConfigError if the files are not fit for it."""
    if http.ssl_certfile is None:
        if http.ssl_keyfile is not None:
            raise ConfigError("--ssl-keyfile goes with --ssl-certfile; give both.")
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    _load_certificate(context, http)
    return context


def _load_certificate(context: ssl.SSLContext, http: HttpConfig) -> None:
    assert http.ssl_certfile is not None
    try:
        context.load_cert_chain(http.ssl_certfile, http.ssl_keyfile, password="")
    except OSError as error:
        files = " and ".join(file for file in (http.ssl_certfile, http.ssl_keyfile) if file)
        why = error.strerror if error.filename else getattr(error, "reason", None)
        raise ConfigError(
            f"--ssl-certfile: {files} cannot be used ({why or error}); give a PEM certificate "
            "chain and its key, without a passphrase."
        ) from None


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _sources(config: ServerConfig, listener: socket.socket) -> ModelSources:
    """The models, those of them that outlived an earlier server, and where they are kept."""
    is_one, configs, file = pinned_model(config) is not None, config.models, None
    folder = _models_folder(config, listener)
    if folder is not None and not is_one:
        file = folder / "desired.json"
        if (put_before := kept(file)) is not None:
            say(f"headrace: the models are those that were put: {file}")
            configs = put_before
    pulls = Pulls(None if folder is None else folder / "pulled.json")
    return ModelSources(configs, pulls, lambda: reread_folder(config), file, is_one)


def _models_folder(config: ServerConfig, listener: socket.socket) -> Path | None:
    """The place of what is known of models that outlives the server, if it has one."""
    given = config.streams.state_dir
    shared = given is not None and is_redis(given)  # streams are, and each has its own models
    return streams_folder(None if shared else given, listener.getsockname()[1])


class _Serving:
    """One server from start to end. Signals and lost threads set events, `_serve` acts."""

    def __init__(
        self,
        config: ServerConfig,
        model: ServedModel | None,
        listener: socket.socket,
        store: Store,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`model` is the only one, read already; None where there may be several."""
        self._config = config
        self._tls = tls
        self._auth = Auth(config.http)
        self._store = store
        self._model = model
        self._listener = listener
        self._stop = asyncio.Event()
        self._hurry = asyncio.Event()
        self._lost_thread = asyncio.Event()

    async def run(self, lines: LoadLines, traces: Traces) -> int:
        self._watch_signals()
        self._watch_threads()
        metrics = Metrics()
        metrics.traces = traces
        make = self._maker(metrics)
        sources = _sources(self._config, self._listener)
        configs = sources.all()
        aliases = settled_aliases(self._config.alias, (*told_apart(self._config.models), *configs))
        config = msgspec.structs.replace(self._config, alias=aliases)
        hosts = tuple(map(make, configs))
        has_keys = self._auth.num_keys > 0
        known = functools.partial(_known_to_workers, aliases=aliases)
        work = WorkerPool("headrace.protocols.worker", *known(hosts), has_keys)
        generation = Generation(config, hosts, self._store, work, metrics)
        generation.desired = Desired(
            sources, make, lambda hosts: work.renew(*known(hosts)), generation.fleet
        )
        if generation.fleet.pinned is None:
            # of one model any name is its text's, and fresh workers would keep requests waiting
            generation.adapters.on_names = lambda: work.renew(*known(generation.fleet.hosts.all()))
        lines.read_progress = lambda: [
            host.loading.progress for host in generation.fleet.hosts.all()
        ]
        try:
            return await self._serve(generation)
        except ExceptionGroup as broken:
            logger.critical("A part of the server has failed", exc_info=broken)
            say("headrace: a part of the server has failed, so all of it ends; start it again.")
            _end_within(_LAST_S, exits.BROKEN)
            return exits.BROKEN
        finally:
            await generation.fleet.close()
            traces.close()

    def _shelf(self) -> Shelf:
        """The place of files and batches: with the streams, and as lasting as they are."""
        given = self._config.streams.state_dir
        if given is not None and is_redis(given):
            from headrace.batches.redis_shelf import redis_shelf

            return redis_shelf(self._store)
        folder = streams_folder(given, self._listener.getsockname()[1])
        return temporary_shelf() if folder is None else folder_shelf(folder / "batches")

    def _maker(self, metrics: Metrics) -> Callable[[ModelConfig], ModelHost]:
        """The function that makes the host of a model, by its settings."""
        config, start, first = self._config, self._starter(), self._model
        cache_bytes = None if config.loading.models_memory_bytes is None else CACHE_BYTES

        def make(model: ModelConfig) -> ModelHost:
            if first is not None and model.model == config.models[0].model:
                return ModelHost(model, start, metrics, first)
            return ModelHost(model, start, Metrics(), cache_bytes=cache_bytes)

        return make

    def _starter(self) -> Start:
        """Makes the engine of a model, or several; those of one machine take turns."""
        config = self._config
        timeout_s, idle_s = config.streams.load_timeout_s, config.loading.idle_unload_s
        numbers = itertools.count()
        lock_fds = open_core_lock()

        def start(model: ModelConfig) -> EngineClient:
            def start_one() -> EngineClient:
                if config.cluster is not None:
                    from headrace.engines.ray_engine import RayEngine

                    return RayEngine(model, timeout_s)
                return Supervisor(model, timeout_s, next(numbers), lock_fds)

            if model.replicas == 1 and config.cluster is None:
                return start_one()
            return Replicas(start_one, *between(model), idle_s)

        return start

    async def _serve(self, generation: Generation) -> int:
        """Serves until a signal or the engine's end; ExceptionGroup if anything else ends first."""
        app = create_app(generation, self._config, self._auth, self._shelf())
        name = f"{socket.gethostname()}:{self._listener.getsockname()[1]}"
        self._store.tell(lambda: about(name, generation))
        most = self._config.http.max_body_bytes + ENVELOPE_BYTES
        http = self._config.http
        bounds = Bounds(http.max_connections, http.headers_timeout_s)
        server = HttpServer(app, _KEEP_ALIVE_S, _FAREWELL_S, self._tls, most, bounds)
        async with asyncio.TaskGroup() as tasks:
            generating = tasks.create_task(generation.run(), name="generation")
            serving = tasks.create_task(server.serve(sockets=[self._listener]), name="http")
            batching = tasks.create_task(app.state.batches.run(), name="batches")
            announcing = tasks.create_task(self._announce(generation), name="announce")
            works = (generating, serving, batching)
            await _first(self._stop, self._lost_thread, generation.died, *works)
            if self._stop.is_set():
                draining = tasks.create_task(self._drain(generation), name="drain")
                await _first(self._hurry, draining)
                draining.cancel()
            elif not generation.died.is_set():
                raise HeadraceError("generation, http or a thread ended unasked")
            code = self._verdict(generation)
            _end_within(_LAST_S, code)
            announcing.cancel()
            batching.cancel()
            server.should_exit = True
            await generation.fleet.close()
        return code

    async def _drain(self, generation: Generation) -> None:
        seconds = self._config.streams.drain_s
        if number := len(generation.streams):
            streams = "1 stream has" if number == 1 else f"{number} streams have"
            say(f"headrace: {streams} up to {seconds:g} s to end; Ctrl-C again ends at once.")
        await generation.drain(seconds)

    def _watch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP:
                loop.add_signal_handler(number, self._on_signal)
            elif self._has_files:
                loop.add_signal_handler(number, self._reload)
            elif signal.getsignal(number) != signal.SIG_IGN:  # nohup
                loop.add_signal_handler(number, self._on_signal)

    @property
    def _has_files(self) -> bool:
        """Whether there is something that can be read again."""
        http = self._config.http
        return any((http.api_key_file, http.admin_key_file, http.ssl_certfile))

    def _reload(self) -> None:
        """Takes keys and certificate as their files are now; connections that there are stay."""
        try:
            self._auth.reload()
            if self._tls is not None:
                _load_certificate(self._tls, self._config.http)
        except ConfigError as error:
            logger.error("SIGHUP: %s What was read before still counts.", error)
        else:
            logger.info("SIGHUP: keys and certificate are read again")

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
        if self._auth.is_open_to_all:
            say(
                f"headrace: {http.host} serves other machines, and no key is asked for; give one "
                "with HEADRACE_API_KEYS or --api-key-file."
            )
        scheme = "http" if self._tls is None else "https"
        url = f"{scheme}://{address_of(self._listener)}{http.api_prefix}"
        if (host := generation.fleet.pinned) is not None:
            ready = await host.engine.wait_until_ready()
            if host.model.sampling_words:
                say(f"headrace: {host.model.sampling_words}.")
            say(_ready_line(url, host.name, ready))
            return
        names = ", ".join(printable(host.name) for host in generation.fleet.hosts.all())
        say(f"Headrace is ready at {url}: models are loaded when they are asked for: {names}")

    def _verdict(self, generation: Generation) -> int:
        if not generation.died.is_set():
            return exits.DONE
        say(f"headrace: {generation.last_words}")
        return exits.ENGINE if self._model and self._model.ready else exits.MODEL


def _known_to_workers(hosts: tuple[ModelHost, ...], aliases: tuple[str, ...]) -> tuple[bytes, bool]:
    """The models that workers begin with, and whether images need a worker of their own."""
    # what came from the hub is not asked for there again; a path stays a name
    known = [
        host.local
        if host.known and not host.paths
        else msgspec.structs.replace(host.config, adapter=host.adapters)
        for host in hosts
    ]
    return msgspec.msgpack.encode((known, aliases)), any(host.may_see_images for host in hosts)


def _ready_line(url: str, name: str, ready: Ready) -> str:
    target = "off" if ready.max_stall_s is None else f"{1000 * ready.max_stall_s:g} ms"
    seqs = f"{ready.max_num_seqs} stream{'s' * (ready.max_num_seqs > 1)} at once"
    tokens = ready.layout.num_positions
    seqs += f", {tokens} tokens fit" * (tokens > 0)
    return (
        f"Headrace is ready at {url}: {printable(name)}, lane {ready.lane}, "
        f"{ready.device} {ready.dtype}, kernels {ready.kernels} ({ready.kernels_reason}), "
        f"context {ready.max_model_len}, {seqs}, stall target {target}"
    )


def _end_within(seconds: float, code: int) -> None:
    """Ends the process even if something keeps it from ending by itself."""
    timer = threading.Timer(seconds, os._exit, (code,))
    timer.daemon = True
    timer.start()


async def _first(*things: "asyncio.Event | asyncio.Task[None]") -> None:
    """Waits until one of them has happened."""
    async with race(*(it if isinstance(it, asyncio.Task) else it.wait() for it in things)):
        pass
