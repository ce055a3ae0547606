"""Loads and unloads the models of a server, and lets requests wait for a model."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from typing import Any

from headrace.fleet.engine_life import EngineClosed
from headrace.fleet.memory_policy import MemoryPolicy, Stage
from headrace.fleet.model_host import ModelHost
from headrace.fleet.roster import Roster
from headrace.text.model_names import Aliases, Models
from headrace_common.config.settings import ModelConfig, ServerConfig
from headrace_common.errors import ModelError, RequestError
from headrace_common.log_context import note
from headrace_common.system.race import race

logger = logging.getLogger(__name__)

_CHECK_INTERVAL_S = 1.0
_OVERLOADED_RETRY_S = 5.0
_SHUTS_DOWN = RequestError("server_shutdown", "The server is shutting down.")


class _Ticket:
    """A request that waits in the queue for a model.

    `outcome` becomes None once the request may use the model. A refusal sets `outcome` to the
    error.
    """

    def __init__(self, is_used: bool) -> None:
        self.outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # True for a client's request; False if the model is loaded in advance.
        self.is_used = is_used
        self.has_entered = False


class Fleet:
    """Loads and unloads models as MemoryPolicy decides, so that requests can use the models.

    A server that was started with a single model loads this model at the start. The model is
    `pinned` while the server has no other model. A pinned model is never unloaded, and the server
    ends when the model's engine ends.

    `on_loaded` is called with a model's host after the load. `on_lost` is called if the load
    failed or the engine was given up. `on_unknown` is awaited when a client names a model that is
    not served; this callback may add models.
    """

    def __init__(
        self,
        hosts: tuple[ModelHost, ...],
        config: ServerConfig,
        on_loaded: Callable[[ModelHost], None],
        on_lost: Callable[[ModelHost], None],
        on_unknown: Callable[[], Awaitable[None]],
    ) -> None:
        self.roster = Roster(hosts, Aliases(config.alias))
        self.pinned = hosts[0] if pinned_model(config) and len(hosts) == 1 else None
        # Set when no engine runs and no engine will be started.
        self.ended = asyncio.Event()
        self._config = config
        self._on_loaded, self._on_lost, self._on_unknown = on_loaded, on_lost, on_unknown
        self._policy = MemoryPolicy[_Ticket]()
        # Done once the server refuses all requests. The result is the error for these requests.
        self._refusal: asyncio.Future[RequestError] = asyncio.get_running_loop().create_future()
        # The functions to call once a removed model has no engine and no users left. The keys are
        # model names.
        self._after_removal: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {}
        # Names of loading models that will be unloaded again after the waiting requests have used
        # the models.
        self._unload_after_load: set[str] = set()
        self._group: asyncio.TaskGroup
        self._tasks: set[asyncio.Task[None]] = set()
        for host in hosts:
            self._policy.add(host.name, host.num_bytes)
        if self.pinned is None:
            self._set_limits()

    def _set_limits(self) -> None:
        limits = self._config.loading
        self._policy.limit(limits.max_models, limits.models_memory_bytes)

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Start background tasks in this group: load the pinned model, and unload idle models."""
        self._group = tasks
        if pinned_model(self._config):
            self.need(self.hosts.first)
        if (after_s := self._config.loading.idle_unload_s) is not None:
            self._spawn(self._unload_idle(after_s))

    @property
    def hosts(self) -> Models[ModelHost]:
        """The models that are served now."""
        return self.roster.hosts

    async def find(self, name: str | None) -> ModelHost:
        """Return the host of a model; RequestError if no model has this name."""
        host = None if name is None else self.hosts.find(name)
        if host is None:
            # `resolve` may read the folder of models again.
            meant = None if name is None else await self.resolve(name)
            host = self.hosts.exact(meant)
        note(model=host.name)
        return host

    async def resolve(self, name: str) -> str:
        """Return the name of the model or adapter that a client means (see `Models.resolve`).

        A model that was just added to the folder of models takes precedence over an alias.
        """
        if self.hosts.find(name) is None:
            await self._on_unknown()
        return self.hosts.resolve(name)

    def fetch(self, host: ModelHost) -> "asyncio.Task[None]":
        """Download and read a model in the background, before a request needs the model."""
        # `hold` counts as a use of the model. Without a use, the model's files could be deleted
        # during the read, and would then be downloaded again.
        self.hold(host)
        return self._spawn(self._fetch(host))

    async def _fetch(self, host: ModelHost) -> None:
        try:
            # `read` has already logged the error.
            with contextlib.suppress(RequestError):
                await self.read(host)
        finally:
            self.release(host)

    @contextlib.asynccontextmanager
    async def using(self, name: str | None) -> AsyncIterator[ModelHost]:
        """Keep a model in memory for the duration of the context, and yield the model's host.

        Waits until the model is loaded. Raises RequestError if the model does not exist or cannot
        be loaded.
        """
        host = await self.enter(await self.find(name))
        try:
            yield host
        finally:
            self.release(host)

    async def enter(self, host: ModelHost, is_used: bool = True) -> ModelHost:
        """Wait until the model is in memory, and count a use of the model; `release` ends the use.

        Returns the model's current host: a host with other settings may have replaced `host`
        during the wait. Raises RequestError if the model cannot be loaded.
        """
        if not host.is_here:
            await self.read(host)
        if self._refusal.done():
            raise self._refusal.result().with_traceback(None)
        # Raises RequestError if the model was removed meanwhile. Only a resumed stream may load a
        # model that will be removed.
        current = self.hosts.exact(host.name) if is_used else self.roster.get(host.name)
        if self.enter_now(current):
            return current
        name = current.name
        ticket = _Ticket(is_used)
        self._policy.ask(name, ticket)
        self._apply_moves()
        try:
            await ticket.outcome
        except BaseException:
            if ticket.has_entered:
                self.release(host)
            raise
        finally:
            self._policy.leave(ticket)
            self._apply_moves()
        return self.roster.get(name)

    def enter_now(self, host: ModelHost) -> bool:
        """Count a use of a model if the model is available now; `release` ends the use.

        Returns False if the request would have to wait, or if the host is not served any more.
        """
        is_served = host in self.roster.hosts.all() and not self._refusal.done()
        return is_served and self._policy.enter(host.name)

    def hold(self, host: ModelHost) -> None:
        """Count a use of the model, such as a stream; `release` ends the use."""
        self._policy.hold(host.name)

    def release(self, host: ModelHost) -> None:
        """End a use of the model."""
        self._policy.release(host.name)
        self._apply_moves()

    def become(self, hosts: tuple[ModelHost, ...]) -> None:
        """Set the models to serve.

        Requests that wait for a removed model fail; running requests continue.
        """
        self.roster.become(hosts, self._config.streams.drain_s)
        if self.pinned and len(hosts) > 1:
            # Once there are several models, any of them may be unloaded.
            self.pinned = None
            self._set_limits()
        for host in self.roster.all():
            self._policy.add(host.name, host.num_bytes)
            if host.name in self.roster.leaving:
                tickets = self._policy.remove_tickets(host.name)
                self._reject(tickets, self.hosts.unknown(host.name))
                self._unload_when_idle(host)
            # If the model is still loading, the change waits until the end of the load (see
            # `_load`).
            elif host.name in self.roster.changing:
                self._policy.unload_when_idle(host.name)
        self._apply_moves()

    def need(self, host: ModelHost) -> None:
        """Load a model in the background, before a request needs the model.

        A failure is reported by `on_lost`.
        """
        self._unload_after_load.discard(host.name)
        if self._policy.stage(host.name) not in (Stage.IN, Stage.LOADING):
            self._spawn(self._load_ahead(host))

    async def _load_ahead(self, host: ModelHost) -> None:
        # Requests that wait for the model get an error too, so this task can ignore the error.
        with contextlib.suppress(RequestError):
            self.release(await self.enter(host, is_used=False))

    def unload(self, host: ModelHost) -> None:
        """Unload a model once its streams have ended.

        A load that no request waits for is stopped.
        """
        self._unload_when_idle(host)
        self._apply_moves()

    def _unload_when_idle(self, host: ModelHost) -> None:
        waiting = self._policy.waiting(host.name)
        if self._policy.stage(host.name) is not Stage.LOADING:
            self._policy.unload_when_idle(host.name)
        elif self._policy.is_used(host.name) or any(it.is_used for it in waiting):
            self._unload_after_load.add(host.name)
        else:
            self._spawn(host.engine.close())

    def when_removed(self, name: str, action: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run `action` once a removed model has no engine and no users left."""
        if name in self.roster.leaving:
            self._after_removal[name] = action
        else:
            self._spawn(action())

    def replace(self, host: ModelHost, replica: int) -> None:
        """Replace a replica with a new engine.

        The old replica's streams have `drain_s` seconds to end.
        """
        self._spawn(host.engine.replace(replica, self._config.streams.drain_s))

    def refuse(self, error: RequestError) -> None:
        """Refuse all waiting requests and all later requests with this error."""
        if not self._refusal.done():
            self._refusal.set_result(error)
        self._reject(self._policy.waiting(), error)

    def check_line(self) -> None:
        """Raise RequestError if too many requests already wait for models."""
        number, most = self._policy.num_waiting, self._config.streams.max_num_queued_reqs
        if number >= max(1, most):
            message = f"{number} requests wait for models, and --max-num-queued-reqs "
            message += f"is {max(1, most)}; try again later."
            raise RequestError("server_overloaded", message, retry_after_s=_OVERLOADED_RETRY_S)

    async def close(self) -> None:
        """Refuse all requests and end all engines."""
        self.refuse(_SHUTS_DOWN)
        await asyncio.gather(*(host.engine.close() for host in self.roster.all()))
        self.ended.set()

    def cancel(self) -> None:
        """Cancel all background tasks, after `close` or when the server fails."""
        for task in self._tasks:
            task.cancel()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        try:
            task = self._group.create_task(work, name="fleet")
        except RuntimeError:
            # The task group has ended, but the HTTP server still answers the last requests.
            work.close()
            raise _SHUTS_DOWN.with_traceback(None) from None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def read(self, host: ModelHost) -> None:
        """Download a model if necessary, and read all of the model except its weights.

        Raises RequestError if the model cannot be read, or as soon as the server refuses requests.
        """
        try:
            async with race(host.read(), self._refusal) as (reading, _):
                if not reading.done():
                    raise self._refusal.result().with_traceback(None)
                reading.result()
        except ModelError as error:
            host.engine.fail(str(error))
            self._log_lost(host, error.code)
            raise _failed(host, error.code) from error
        self._policy.add(host.name, host.num_bytes)

    def _apply_moves(self) -> None:
        for name in self.roster.changing:
            if self._policy.is_gone(name):
                self._apply_change(name)
        while not self._refusal.done() and (move := self._policy.next_move()) is not None:
            host, ticket = self.roster.get(move.model), move.ticket
            if move.kind == "load":
                self._spawn(self._load(host))
            elif move.kind == "unload":
                self._spawn(self._unload(host))
            elif move.kind == "refuse" and ticket is not None:
                host.engine.fail(_too_large(host, self._config.loading.models_memory_bytes or 0))
                self._log_lost(host, "model_too_large")
                self._reject([ticket], _failed(host, "model_too_large"))
            elif ticket is not None and not ticket.outcome.done():
                ticket.has_entered = True
                ticket.outcome.set_result(None)
            # The request was refused or cancelled during the wait, so the use of the model ends.
            else:
                self._policy.release(host.name)

    def _apply_change(self, name: str) -> None:
        """Remove or replace a model that has no engine and no users left."""
        old, new = self.roster.apply_change(name)
        if new is None:
            self._reject(self._policy.remove_tickets(name), self.hosts.unknown(name))
            self._policy.remove(name)
        else:
            self._policy.add(name, new.num_bytes)
        if new is not None and old.engine.num_starts:
            self.need(new)
        if (action := self._after_removal.pop(name, None)) is not None:
            self._spawn(action())

    def _reject(self, waiting: Iterable["_Ticket"], error: RequestError) -> None:
        for it in waiting:
            if not it.outcome.done():
                it.outcome.set_exception(error.with_traceback(None))

    async def _load(self, host: ModelHost) -> None:
        self._log("Loading %s", host.name)
        try:
            host.engine.expect()
            await host.read()
            if self._refusal.done():
                return
            host.begin()
            self._spawn(self._run_engine(host))
            await host.engine.settled
        except EngineClosed:
            self._lose(host, "unloaded")
            return
        except Exception as error:
            if not isinstance(error, ModelError):
                logger.exception("%s could not be loaded", host.name)
            host.engine.fail(str(error))
            self._lose(host, error.code if isinstance(error, ModelError) else "load_failed")
            return
        for sentence in host.model.load_notes:
            self._log("%s", sentence)
        self._policy.loaded(host.name)
        # The exact size of a model is known only after the load.
        self._policy.add(host.name, host.num_bytes)
        self._on_loaded(host)
        if host.name in self.roster.changing:
            # The model will be removed or reloaded once its remaining streams have ended.
            self._policy.unload_when_idle(host.name)
        self._apply_moves()
        if host.name in self._unload_after_load:
            self._unload_after_load.remove(host.name)
            self.unload(host)

    async def _run_engine(self, host: ModelHost) -> None:
        await host.engine.run()
        if host.engine.state == "dead" and self._policy.stage(host.name) is Stage.IN:
            self._lose(host, "engine_failed")
        elif host.engine.state != "dead" and self.pinned:
            self.ended.set()

    def _lose(self, host: ModelHost, code: str) -> None:
        self._log_lost(host, code)
        tickets = self._policy.lost(host.name)
        self._unload_after_load.discard(host.name)
        if host.engine.state == "dead":
            self._on_lost(host)
        self._reject(tickets, _failed(host, code))
        if self.pinned:
            self.ended.set()
        self._apply_moves()

    def _log(self, line: str, *arguments: str) -> None:
        """Log the line, unless a model is pinned.

        The server itself logs the load of a pinned model.
        """
        if not self.pinned:
            logger.info(line, *arguments)

    def _log_lost(self, host: ModelHost, code: str) -> None:
        """Log why a model was lost. Clients only get the code and a reference to the log."""
        if not self.pinned:
            level = logging.ERROR if host.engine.state == "dead" else logging.INFO
            words = (host.name, code, host.engine.last_words)
            logger.log(level, "%s is not served now (%s). %s", *words)

    async def _unload(self, host: ModelHost) -> None:
        self._log("Unloading %s", host.name)
        await host.engine.close()
        self._policy.unloaded(host.name)
        self._apply_moves()

    async def _unload_idle(self, after_s: float) -> None:
        """Unload each model that no request has used for `after_s` seconds.

        Idle time is counted in passes of this loop. A clock would also count the time for which
        this process was suspended, when no client could send a request.
        """
        interval_s = min(_CHECK_INTERVAL_S, after_s)
        # The number of passes in which a model was idle. The keys are pairs of a model's name and
        # the number of the model's last use.
        ticks: dict[tuple[str, int], int] = {}
        while True:
            await asyncio.sleep(interval_s)
            ticks = {rest: ticks.get(rest, -1) + 1 for rest in self._policy.idle()}
            for (name, _), number in ticks.items():
                if number * interval_s >= after_s and self.pinned is None:
                    self.unload(self.roster.get(name))


def pinned_model(config: ServerConfig) -> ModelConfig | None:
    """Return the model to load at the start and to keep in memory, or None."""
    is_one = len(config.models) == 1 and config.loading.models_dir is None
    return config.models[0] if is_one and config.models[0].min_replicas != 0 else None


def _failed(host: ModelHost, code: str) -> RequestError:
    message = f"The model {host.name!r} could not be loaded ({code})"
    return RequestError("load_failed", f"{message}; the server's log says why.", "model")


def _too_large(host: ModelHost, limit: int) -> str:
    return (
        f"{host.name} needs about {host.num_bytes >> 20} MiB with its cache, but "
        f"--models-memory-bytes allows {limit >> 20} MiB; raise that limit, or lower "
        "--kv-cache-memory-bytes."
    )
