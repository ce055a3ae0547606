"""All models of a server: brings them in and out of memory, and lets requests wait for them."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from typing import Any

from headrace.fleet.engine_life import EngineClosed
from headrace.fleet.memory_policy import Residency, Stage
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


class _Wait:
    """The ticket of one who waits for a model, who is told once: to enter, or why not."""

    def __init__(self, is_used: bool) -> None:
        self.told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.is_used = is_used  # by a request; else the model is loaded for later ones
        self.has_entered = False


class Fleet:
    """Brings models in and out of memory for those who ask, by Residency's moves.

    The model of a server that began with one is loaded at the start. While there is no other it is
    `pinned`: it stays, and the server ends with it.
    `on_loaded` and `on_lost` are called with a host whose engine came up or was given up.
    """

    def __init__(
        self,
        hosts: tuple[ModelHost, ...],
        config: ServerConfig,
        on_loaded: Callable[[ModelHost], None],
        on_lost: Callable[[ModelHost], None],
    ) -> None:
        self.roster = Roster(hosts, Aliases(config.alias))
        self.pinned = hosts[0] if pinned_model(config) and len(hosts) == 1 else None
        self.ended = asyncio.Event()  # no engine runs, and none will
        self._config = config
        self._on_loaded, self._on_lost = on_loaded, on_lost
        self.on_unknown: Callable[[], Awaitable[None]] | None = None  # for a name nobody has
        # of one that was removed, or replaced
        self.on_gone: Callable[[ModelHost], object] = lambda host: None
        self._residency = Residency[_Wait]()
        # the error for all requests, once none is served any more
        self._refusal: asyncio.Future[RequestError] = asyncio.get_running_loop().create_future()
        self._then: dict[str, Callable[[], Coroutine[Any, Any, None]]] = {}  # once a model is gone
        self._after_load: set[str] = set()  # models to send out once their waiters have entered
        self._group: asyncio.TaskGroup
        self._tasks: set[asyncio.Task[None]] = set()
        for host in hosts:
            self._residency.add(host.name, host.num_bytes)
        if self.pinned is None:
            self._set_limits()

    def _set_limits(self) -> None:
        limits = self._config.loading
        self._residency.limit(limits.max_models, limits.models_memory_bytes)

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """All tasks are those of this group from now on."""
        self._group = tasks
        if pinned_model(self._config):
            self.need(self.hosts.first)
        if (after_s := self._config.loading.idle_unload_s) is not None:
            self._spawn(self._unload_idle(after_s))

    @property
    def hosts(self) -> Models[ModelHost]:
        """The models there are."""
        return self.roster.hosts

    async def find(self, name: str | None) -> ModelHost:
        """The host of that name; RequestError if there is no such model."""
        host = None if name is None else self.hosts.find(name)
        if host is None:
            meant = None if name is None else await self.resolve(name)  # may take up other models
            host = self.hosts.exact(meant)
        note(model=host.name)
        return host

    async def resolve(self, name: str) -> str:
        """Return the name of the model or adapter that a client means, as `Models.resolve` does.

        A model that has just come into the folder of models takes precedence over an alias.
        """
        if self.hosts.find(name) is None and self.on_unknown is not None:
            await self.on_unknown()
        return self.hosts.resolve(name)

    def fetch(self, host: ModelHost) -> "asyncio.Task[None]":
        """Reads a model, which may be a download, whether anybody waits or not."""
        self.hold(host)  # else its files could be removed while they are read, and come again
        return self._spawn(self._fetch(host))

    async def _fetch(self, host: ModelHost) -> None:
        try:
            with contextlib.suppress(RequestError):  # the log says why it failed
                await self.read(host)
        finally:
            self.release(host)

    @contextlib.asynccontextmanager
    async def using(self, name: str | None) -> AsyncIterator[ModelHost]:
        """The model of that name, in memory as long as the context lasts.

        Waits for it; RequestError if it cannot be loaded, or if there is no such model.
        """
        host = await self.enter(await self.find(name))
        try:
            yield host
        finally:
            self.release(host)

    async def enter(self, host: ModelHost, is_used: bool = True) -> ModelHost:
        """A use begins once the model is in memory; `release` ends it.

        Others may have come in the host's place meanwhile. RequestError if it cannot be loaded.
        """
        if not host.is_here:
            await self.read(host)
        if self._refusal.done():
            raise self._refusal.result().with_traceback(None)
        name = self.roster.get(host.name).name  # RequestError if it was dropped meanwhile
        if self._residency.enter(name):
            return self.roster.get(name)
        ticket = _Wait(is_used)
        self._residency.ask(name, ticket)
        self._act()
        try:
            await ticket.told
        except BaseException:
            if ticket.has_entered:
                self.release(host)
            raise
        finally:
            self._residency.leave(ticket)
            self._act()
        return self.roster.get(name)

    def hold(self, host: ModelHost) -> None:
        """A use begins, such as a stream's."""
        self._residency.hold(host.name)

    def release(self, host: ModelHost) -> None:
        """A use ends."""
        self._residency.release(host.name)
        self._act()

    def become(self, hosts: tuple[ModelHost, ...]) -> None:
        """Sets the models. Running work goes on; requests for removed models are refused."""
        self.roster.become(hosts, self._config.streams.drain_s)
        if self.pinned and len(hosts) > 1:
            self.pinned = None  # from now on a model may make room for another
            self._set_limits()
        for host in self.roster.all():
            self._residency.add(host.name, host.num_bytes)
            if host.name in self.roster.leaving:
                tickets = self._residency.send_away(host.name)
                self._tell(tickets, self.hosts.unknown(host.name))
                self._send_out(host)
            elif host.name in self.roster.changing():  # a load is ended first
                self._residency.send_out(host.name)
        self._act()

    def need(self, host: ModelHost) -> None:
        """Brings it in when its turn comes; nobody waits, and a failure is told by `on_lost`."""
        self._after_load.discard(host.name)
        if self._residency.stage(host.name) not in (Stage.IN, Stage.LOADING):
            self._spawn(self._bring(host))

    async def _bring(self, host: ModelHost) -> None:
        with contextlib.suppress(RequestError):  # waiting requests get the error
            self.release(await self.enter(host, is_used=False))

    def unload(self, host: ModelHost) -> None:
        """Sends it out once its streams have ended; a load is given up if nobody waits for it."""
        self._send_out(host)
        self._act()

    def _send_out(self, host: ModelHost) -> None:
        waiting = self._residency.waiting(host.name)
        if self._residency.stage(host.name) is not Stage.LOADING:
            self._residency.send_out(host.name)
        elif self._residency.is_used(host.name) or any(it.is_used for it in waiting):
            self._after_load.add(host.name)
        else:
            self._spawn(host.engine.close())

    def when_gone(self, name: str, then: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Does `then` once nothing runs of a model that was removed."""
        if name in self.roster.leaving:
            self._then[name] = then
        else:
            self._spawn(then())

    def replace(self, host: ModelHost, replica: int) -> None:
        """Puts a fresh engine in the place of one of several; its streams have time to end."""
        self._spawn(host.engine.replace(replica, self._config.streams.drain_s))

    def refuse(self, error: RequestError) -> None:
        """Sends all away who wait, and all who come."""
        if not self._refusal.done():
            self._refusal.set_result(error)
        self._tell(self._residency.waiting(), error)

    def check_line(self) -> None:
        """RequestError if as many wait for models as may."""
        number, most = len(self._residency.waiting()), self._config.streams.max_num_queued_reqs
        if number >= max(1, most):
            message = f"{number} requests wait for models, and --max-num-queued-reqs "
            message += f"is {max(1, most)}; try again later."
            raise RequestError("server_overloaded", message, retry_after_s=_OVERLOADED_RETRY_S)

    async def close(self) -> None:
        """Ends all engines."""
        self.refuse(RequestError("server_shutdown", "The server is shutting down."))
        await asyncio.gather(*(host.engine.close() for host in self.roster.all()))
        self.ended.set()

    def cancel(self) -> None:
        """Drops what is under way; after `close`, or when the server fails."""
        for task in self._tasks:
            task.cancel()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = self._group.create_task(work, name="fleet")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def read(self, host: ModelHost) -> None:
        """Reads all of a model but its weights, after a download; RequestError if that fails.

        Nobody waits for it once the server refuses requests.
        """
        try:
            async with race(host.read(), self._refusal) as (reading, _):
                if not reading.done():
                    raise self._refusal.result().with_traceback(None)
                reading.result()
        except ModelError as error:
            host.engine.fail(str(error))
            self._say_lost(host, error.code)
            raise _failed(host, error.code) from error
        self._residency.add(host.name, host.num_bytes)

    def _act(self) -> None:
        for name in self.roster.changing():
            if self._residency.is_gone(name):
                self._settle(name)
        while not self._refusal.done() and (move := self._residency.next_move()) is not None:
            host, ticket = self.roster.get(move.model), move.ticket
            if move.kind == "load":
                self._spawn(self._load(host))
            elif move.kind == "unload":
                self._spawn(self._unload(host))
            elif move.kind == "refuse" and ticket is not None:
                host.engine.fail(_too_large(host, self._config.loading.models_memory_bytes or 0))
                self._say_lost(host, "model_too_large")
                self._tell([ticket], _failed(host, "model_too_large"))
            elif ticket is not None and not ticket.told.done():
                ticket.has_entered = True
                ticket.told.set_result(None)
            else:  # stopped, and about to leave
                self._residency.release(host.name)

    def _settle(self, name: str) -> None:
        """Removes or replaces a model that was to leave, since nothing of it runs."""
        old, new = self.roster.settle(name)
        if new is None:
            self._residency.remove(name)
        else:
            self._residency.add(name, new.num_bytes)
        self.on_gone(old)
        if new is not None and old.engine.num_starts:
            self.need(new)
        if (then := self._then.pop(name, None)) is not None:
            self._spawn(then())

    def _tell(self, waiting: Iterable["_Wait"], error: RequestError) -> None:
        for it in waiting:
            if not it.told.done():
                it.told.set_exception(error.with_traceback(None))

    async def _load(self, host: ModelHost) -> None:
        self._say("Loading %s", host.name)
        try:
            host.engine.state = "loading"
            await host.read()
            if self._refusal.done():
                return
            host.begin()
            self._spawn(self._hear(host))
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
        if host.model.sampling_words:
            self._say("%s", host.model.sampling_words)
        self._residency.loaded(host.name)
        self._residency.add(host.name, host.num_bytes)  # now it is known
        self._on_loaded(host)
        if host.name in self.roster.changing():
            self._residency.send_out(host.name)  # loaded for streams that it had left
        self._act()
        if host.name in self._after_load:
            self._after_load.remove(host.name)
            self.unload(host)

    async def _hear(self, host: ModelHost) -> None:
        await host.engine.run()
        if host.engine.state == "dead" and self._residency.stage(host.name) is Stage.IN:
            self._lose(host, "engine_failed")
        elif host.engine.state != "dead" and self.pinned:
            self.ended.set()

    def _lose(self, host: ModelHost, code: str) -> None:
        self._say_lost(host, code)
        tickets = self._residency.lost(host.name)
        self._after_load.discard(host.name)
        if host.engine.state == "dead":
            self._on_lost(host)
        self._tell(tickets, _failed(host, code))
        if self.pinned:
            self.ended.set()
        self._act()

    def _say(self, line: str, *arguments: str) -> None:
        """Writes to the log; of a server's only model, the server itself speaks."""
        if not self.pinned:
            logger.info(line, *arguments)

    def _say_lost(self, host: ModelHost, code: str) -> None:
        """Why; clients hear the code alone, and that the log has the rest."""
        if not self.pinned:
            level = logging.ERROR if host.engine.state == "dead" else logging.INFO
            words = (host.name, code, host.engine.last_words)
            logger.log(level, "%s is not served now (%s). %s", *words)

    async def _unload(self, host: ModelHost) -> None:
        self._say("Unloading %s", host.name)
        await host.engine.close()
        self._residency.unloaded(host.name)
        self._act()

    async def _unload_idle(self, after_s: float) -> None:
        """Rests are counted in ticks: while this process was stopped, nobody could have asked."""
        interval_s = min(_CHECK_INTERVAL_S, after_s)
        ticks: dict[tuple[str, int], int] = {}  # by model and its last use
        while True:
            await asyncio.sleep(interval_s)
            ticks = {rest: ticks.get(rest, -1) + 1 for rest in self._residency.idle()}
            for (name, _), number in ticks.items():
                if number * interval_s >= after_s and self.pinned is None:
                    self.unload(self.roster.get(name))


def pinned_model(config: ServerConfig) -> ModelConfig | None:
    """The model that is loaded at the start and stays; None if models come and go."""
    is_one = len(config.models) == 1 and config.loading.models_dir is None
    return config.models[0] if is_one and config.models[0].min_replicas != 0 else None


def _failed(host: ModelHost, code: str) -> RequestError:
    message = f"The model {host.name!r} could not be loaded ({code})"
    return RequestError("load_failed", f"{message}; the server's log says why.", "model")


def _too_large(host: ModelHost, limit: int) -> str:
    return (
        f"{host.name} takes about {host.num_bytes >> 20} MiB with its cache, and "
        f"--models-memory-bytes allows {limit >> 20} MiB; raise it, or lower "
        "--kv-cache-memory-bytes."
    )
