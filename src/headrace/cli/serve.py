"""`headrace serve`: opens sockets and files, runs the server, and stops it after a signal."""

import asyncio
import contextlib
import errno
import itertools
import logging
import os
import signal
import socket
import ssl
import threading
import time
from pathlib import Path

from headrace.batches.folder import folder_batch_store, temporary_batch_store
from headrace.batches.store import BatchStore
from headrace.cli import exit_codes
from headrace.cli.default_model import with_best_model
from headrace.cli.listener import address_of, listen, no_listener, port_in_use
from headrace.cli.load_lines import LoadLines
from headrace.cli.logs import printable, say
from headrace.cli.ready_message import details, models_on_demand, ready_lines
from headrace.cli.state import is_redis, streams_folder, with_prefix_cache
from headrace.engines.client import EngineClient
from headrace.engines.supervisor import Supervisor
from headrace.fleet.fetch_process import fetch_apart
from headrace.fleet.fleet import pinned_model
from headrace.fleet.model_check import read_checked
from headrace.fleet.model_host import Start
from headrace.fleet.model_list import ModelSources, kept
from headrace.fleet.pulls import Pulls
from headrace.fleet.replicas import Replicas, between
from headrace.fleet.served_model import ServedModel
from headrace.gateway.auth import Auth
from headrace.gateway.http_server import (
    Bounds,
    HttpServer,
    raise_descriptors,
)
from headrace.gateway.loading_server import LoadingServer
from headrace.gateway.metrics_routes import about
from headrace.gateway.realtime import ENVELOPE_BYTES
from headrace.generation.generation import Generation
from headrace.metrics.metrics import Metrics
from headrace.metrics.otlp import open_traces
from headrace.metrics.traces import Traces
from headrace.server import Server, Signals, build_server, run_server
from headrace.streams.store import OnCommit, Retention, Store, StoreStalled
from headrace.streams.stores.memory import MemoryStore
from headrace.streams.stores.sqlite import SqliteStore
from headrace.streams.stores.state_dir import StateError, StateInUse
from headrace.text.model_names import settled_aliases, with_unique_names
from headrace_common.checkpoints.find import MINI, find_model, place_of
from headrace_common.config.document import reread_folder
from headrace_common.config.settings import HttpConfig, ModelConfig, ServerConfig
from headrace_common.config.sources import check_names
from headrace_common.errors import ConfigError
from headrace_common.loading import LOOKING, READING
from headrace_common.system.core_lock import open_core_lock
from headrace_common.system.loopback import is_loopback
from headrace_common.version import __version__
from headrace_common.without_engine import WITHOUT_ENGINE, has_engine

logger = logging.getLogger(__name__)

_KEEP_ALIVE_S = 75
_FAREWELL_S = 5  # seconds to send the last bytes to slow clients
_LAST_S = 25.0  # seconds from the drain to the forced end of the process


def serve(config: ServerConfig, lines: LoadLines, chooses: bool = False) -> int:
    """Serve until a signal arrives, and return the exit code. `lines` shows what is loading.

    If `chooses`, the best model on this machine replaces the default model.
    """
    if config.cluster is None and not has_engine():
        raise ConfigError(WITHOUT_ENGINE)
    check_names(with_unique_names(config.models))
    _refuse_missing(config)
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
        named = [it.model for it in config.models if it.model != ModelConfig().model]
        say(f"headrace: {port_in_use(config.http, named)}")
        return exit_codes.IN_USE
    with listener:
        # A server that cannot listen announces no model.
        if chooses:
            config = with_best_model(config)
        model = None
        if (pinned := pinned_model(config)) is not None:
            # Report a wrong alias before a download.
            if config.alias:
                settled_aliases(config.alias, _sources(config, listener).all())
            is_local = pinned.model == MINI or place_of(pinned.model) is not None
            lines.watch.begin(READING if is_local else LOOKING)
            with LoadingServer(listener, lines.watch, tls, config.http.api_prefix) as room:
                path = fetch_apart(pinned, room)
                lines.watch.begin(READING)
                model = read_checked(pinned, path)
        with asyncio.Runner(loop_factory=_new_loop) as runner:
            return runner.run(_run(config, model, listener, tls, lines, traces))


def _refuse_missing(config: ServerConfig) -> None:
    """Raise ModelError if the model to load at the start is a local path that does not exist.

    Called before the port is opened. Otherwise, if the port is also in use, only that error would
    be shown. Hub ids are not checked, because only the hub knows them.
    """
    if (pinned := pinned_model(config)) is None:
        return
    place = place_of(pinned.model)
    if place is not None and not os.path.exists(place):
        # Raises the error that says which names are possible.
        find_model(pinned.model)


async def _run(
    config: ServerConfig,
    model: ServedModel | None,
    listener: socket.socket,
    tls: ssl.SSLContext | None,
    lines: LoadLines,
    traces: Traces,
) -> int:
    metrics = Metrics(traces)
    on_commit = metrics.server.committed
    try:
        store = await _open_store(config.streams.state_dir, listener.getsockname()[1], on_commit)
    except StateError as error:
        say(f"headrace: {error}")
        return exit_codes.IN_USE if isinstance(error, StateInUse) else exit_codes.FAILED
    try:
        code = await _Serving(config, model, listener, store, tls).run(lines, metrics)
        cut = await _cut_streams(store) if code == exit_codes.DONE else ""
    finally:
        await store.close()
    if code == exit_codes.DONE:
        say(f"headrace: stopped{cut}.")
    return code


async def _cut_streams(store: Store) -> str:
    """Describe the streams that the next start continues; "" without streams, or with Redis."""
    if not isinstance(store, SqliteStore):
        return ""
    try:
        number = (await store.sweep(Retention(), time.time())).num_live
    except StoreStalled:
        return ""
    streams = "1 stream continues" if number == 1 else f"{number} streams continue"
    return f"; {streams} at the next start" if number else ""


async def _open_store(state_dir: str | None, port: int, on_commit: OnCommit) -> Store:
    if state_dir is not None and is_redis(state_dir):
        return await _open_redis(state_dir, on_commit)
    folder = streams_folder(state_dir, port)
    return MemoryStore() if folder is None else SqliteStore.open(folder, on_commit)


async def _open_redis(url: str, on_commit: OnCommit) -> Store:
    try:
        from headrace.streams.stores.redis import RedisStore
    except ModuleNotFoundError as missing:
        raise StateError(
            "--state-dir redis://… needs the redis package: pip install '.[redis]' in the checkout."
        ) from missing
    return await RedisStore.open(url, on_commit)


def _tls(http: HttpConfig) -> ssl.SSLContext | None:
    """Return the TLS context; None for plain HTTP. Raises ConfigError for unusable files."""
    if http.ssl_certfile is None:
        if http.ssl_keyfile is not None:
            raise ConfigError("--ssl-keyfile needs --ssl-certfile, too.")
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
    """Return the models to serve, and the file that stores changes to the models.

    The models are those of the last PUT /manage/desired, or else the configured models. Models that
    were downloaded on request in an earlier run are added.
    """
    is_one, configs, file = pinned_model(config) is not None, config.models, None
    folder = _models_folder(config, listener)
    if folder is not None and not is_one:
        file = folder / "desired.json"
        if (put_before := kept(file)) is not None:
            say(f"headrace: the models are those of the last PUT /manage/desired: {file}")
            configs = put_before
    pulls = Pulls(None if folder is None else folder / "pulled.json")
    return ModelSources(configs, pulls, lambda: reread_folder(config), file, is_one)


def _models_folder(config: ServerConfig, listener: socket.socket) -> Path | None:
    """Return the folder that keeps the list of models across restarts, or None."""
    given = config.streams.state_dir
    # Servers share streams in Redis, but each server has a separate list of models.
    shared = given is not None and is_redis(given)
    return streams_folder(None if shared else given, listener.getsockname()[1])


class _Serving:
    """Runs a server from start to end. `_serve` handles signals and failed threads."""

    def __init__(
        self,
        config: ServerConfig,
        model: ServedModel | None,
        listener: socket.socket,
        store: Store,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Create the server. `model` is given if the server has one model that was already read."""
        self._config = config
        self._tls = tls
        self._auth = Auth(config.http)
        self._store = store
        self._model = model
        self._listener = listener
        self._signals = Signals()

    async def run(self, lines: LoadLines, metrics: Metrics) -> int:
        self._watch_signals()
        self._watch_threads()
        sources = _sources(self._config, self._listener)
        parts = (self._starter(), self._store, self._batch_store(), self._auth, metrics)
        server = build_server(self._config, sources, self._model, *parts)
        fleet = server.generation.fleet
        lines.follow(lambda: [host.loading.progress for host in fleet.hosts.all()])
        try:
            return await self._serve(server)
        except ExceptionGroup as broken:
            logger.critical("A part of the server has failed", exc_info=broken)
            say("headrace: a part of the server has failed, so the server stops; start it again.")
            _end_within(_LAST_S, exit_codes.BROKEN)
            return exit_codes.BROKEN
        finally:
            await fleet.close()
            metrics.traces.close()

    def _batch_store(self) -> BatchStore:
        """Return the store of files and batches, which is as durable as the store of streams."""
        given = self._config.streams.state_dir
        if given is not None and is_redis(given):
            from headrace.batches.redis_store import redis_batch_store

            return redis_batch_store(self._store)
        folder = streams_folder(given, self._listener.getsockname()[1])
        return temporary_batch_store() if folder is None else folder_batch_store(folder / "batches")

    def _starter(self) -> Start:
        """Return a function that starts a model's engine or its replicas.

        The engines of one machine share a lock, so that the engines take turns.
        """
        config = self._config
        timeout_s, idle_s = config.streams.load_timeout_s, config.loading.idle_unload_s
        numbers = itertools.count()
        lock_fds = open_core_lock()

        def start(model: ModelConfig) -> EngineClient:
            model = with_prefix_cache(model, config)

            def start_one() -> EngineClient:
                if config.cluster is not None:
                    from headrace.engines.ray_engine import RayEngine

                    return RayEngine(model, timeout_s)
                return Supervisor(model, timeout_s, next(numbers), lock_fds)

            if model.replicas == 1 and config.cluster is None:
                return start_one()
            return Replicas(start_one, *between(model), idle_s)

        return start

    async def _serve(self, built: Server) -> int:
        """Serve until a signal or the engine's end. If another part fails, raise ExceptionGroup."""
        generation = built.generation
        name = f"{socket.gethostname()}:{self._listener.getsockname()[1]}"
        self._store.tell(lambda: about(name, generation))
        most = self._config.http.max_body_bytes + ENVELOPE_BYTES
        http = self._config.http
        bounds = Bounds(http.max_connections, http.headers_timeout_s)
        server = HttpServer(built.app, _KEEP_ALIVE_S, _FAREWELL_S, self._tls, most, bounds)
        code = exit_codes.DONE

        def ends() -> None:
            nonlocal code
            code = self._verdict(generation)
            _end_within(_LAST_S, code)
            announcing.cancel()
            server.should_exit = True

        async with asyncio.TaskGroup() as tasks:
            announcing = tasks.create_task(self._announce(generation), name="announce")
            serving = server.serve(sockets=[self._listener])
            await run_server(built, serving, self._signals, self._drain, ends)
        return code

    async def _drain(self, generation: Generation) -> None:
        seconds = self._config.streams.drain_s
        if number := len(generation.streams):
            streams = "1 stream has" if number == 1 else f"{number} streams have"
            say(
                f"headrace: {streams} up to {seconds:g} s to finish; "
                "press Ctrl-C again to stop now."
            )
        await generation.drain(seconds)

    def _watch_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP:
                loop.add_signal_handler(number, self._on_signal)
            elif self._has_files:
                loop.add_signal_handler(number, self._reload)
            # Under nohup, SIGHUP is ignored.
            elif signal.getsignal(number) != signal.SIG_IGN:
                loop.add_signal_handler(number, self._on_signal)

    @property
    def _has_files(self) -> bool:
        """Return whether there are key or certificate files to reload."""
        http = self._config.http
        return any((http.api_key_file, http.admin_key_file, http.ssl_certfile))

    def _reload(self) -> None:
        """Read the keys and the certificate from their files again. Connections stay open."""
        try:
            self._auth.reload()
            if self._tls is not None:
                _load_certificate(self._tls, self._config.http)
        except ConfigError as error:
            logger.error(
                "SIGHUP: %s The keys and certificate that were read before stay in force.", error
            )
        else:
            logger.info("SIGHUP: keys and certificate were reloaded")

    def _watch_threads(self) -> None:
        """Treat a failed thread, such as the store's writer, like a failed task."""
        loop = asyncio.get_running_loop()

        def on_failure(lost: threading.ExceptHookArgs) -> None:
            threading.__excepthook__(lost)
            # The loop has already ended.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._signals.lost_thread.set)

        threading.excepthook = on_failure

    def _on_signal(self) -> None:
        self._signals.stop()

    async def _announce(self, generation: Generation) -> None:
        """Report that the server is ready. First warn if the server can be used without a key."""
        http = self._config.http
        if self._auth.is_open_to_all:
            say(
                f"headrace: other machines can use this server ({http.host}) without a key; "
                "set one with HEADRACE_API_KEYS or --api-key-file."
            )
        scheme = "http" if self._tls is None else "https"
        url = f"{scheme}://{address_of(self._listener)}{http.api_prefix}"
        if (host := generation.fleet.pinned) is not None:
            ready = await host.engine.wait_until_ready()
            for sentence in host.model.load_notes:
                say(f"headrace: {sentence}.")
            logger.debug("%s: %s", host.name, details(ready))
            models = printable(host.name)
        else:
            models = models_on_demand([host.name for host in generation.fleet.hosts.all()])
        for line in ready_lines(url, models, is_loopback(http.host)):
            say(line)

    def _verdict(self, generation: Generation) -> int:
        if not generation.died.is_set():
            return exit_codes.DONE
        say(f"headrace: {generation.last_words}")
        return exit_codes.ENGINE if self._model and self._model.ready else exit_codes.MODEL


def _end_within(seconds: float, code: int) -> None:
    """End the process after `seconds`, even if the process cannot end normally."""
    timer = threading.Timer(seconds, os._exit, (code,))
    timer.daemon = True
    timer.start()
