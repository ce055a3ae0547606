"""All models of a server: brings them in and out of memory, and lets requests wait for them."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

from headrace.awake import STOPPED_S
from headrace.config.settings import LoadingConfig, ServerConfig
from headrace.core.errors import ModelError, RequestError
from headrace.core.log_context import note
from headrace.fleet.engine_life import EngineClosed
from headrace.fleet.memory_policy import Residency, Stage
from headrace.fleet.model_host import ModelHost
from headrace.fleet.served_model import Models

logger = logging.getLogger(__name__)

_LOOK_INTERVAL_S = 1.0
_OVERLOADED_RETRY_S = 5.0


class Fleet:
    """Makes Residency's moves. A server's only model is loaded at the start, and stays.

    `on_loaded` and `on_lost` are called with a host whose engine came up or was given up.
    """

    def __init__(
        self,
        hosts: tuple[ModelHost, ...],
        config: ServerConfig,
        on_loaded: Callable[[ModelHost], None],
        on_lost: Callable[[ModelHost], None],
    ) -> None:
        self.hosts = Models(hosts)
        self.is_sole = is_sole(config)
        self.ended = asyncio.Event()  # no engine runs, and none will
        self._config, self._drain_s = config.loading, config.streams.drain_s
        self._max_waiting = max(1, config.streams.max_num_queued_reqs)
        self._on_loaded, self._on_lost = on_loaded, on_lost
        self.on_unknown: Callable[[], Awaitable[None]] = _nothing  # a name nobody has
        self.on_gone: Callable[[ModelHost], object] = lambda host: (
            None
        )  # it was removed, or replaced
        loading = LoadingConfig() if self.is_sole else config.loading
        self._residency = Residency(loading.max_models, loading.models_memory_bytes)
        self._group: asyncio.TaskGroup
        self._tasks: set[asyncio.Task[None]] = set()
        self._waiting: dict[int, asyncio.Future[None]] = {}  # by ticket
        self._unused: set[int] = set()  # tickets of loads that no request waits for
        self._after_load: set[str] = set()  # models to send out once their waiters have entered
        self._refusal: RequestError | None = None  # of all who come
        self._rested_at: dict[str, float] = {}
        # no longer desired, or to be replaced, once nobody uses them; by name
        self.leaving: dict[str, ModelHost] = {}
        self._successors: dict[str, ModelHost] = {}
        for host in hosts:
            self._residency.add(host.name, host.num_bytes)

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """All tasks are those of this group from now on."""
        self._group = tasks
        if self.is_sole:
            self.need(self.hosts.first)
        elif self._config.idle_unload_s is not None:
            self._spawn(self._unload_idle(self._config.idle_unload_s))

    async def find(self, name: str | None) -> ModelHost:
        """The host of that name; RequestError if there is no such model."""
        if name is not None and self.hosts.find(name) is None:
            await self.on_unknown()
        host = self.hosts.get(name)
        note(model=host.name)
        return host

    def fetch(self, host: ModelHost) -> "asyncio.Task[None]":
        """Reads a model, which may be a download, whether anybody waits or not."""
        return self._spawn(_unless_refused(self.read(host)))

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

    async def enter(self, host: ModelHost) -> ModelHost:
        """A use begins once the model is in memory; `release` ends it.

        Others may have come in the host's place meanwhile. RequestError if it cannot be loaded.
        """
        if self.is_sole:  # requests that come before it has loaded are refused
            self.hold(host)
            return host
        await self._enter(host)
        return self._host(host.name)

    def hold(self, host: ModelHost) -> None:
        """A use begins, such as a stream's."""
        self._residency.hold(host.name)

    def release(self, host: ModelHost) -> None:
        """A use ends."""
        self._residency.release(host.name)
        self._rested_at[host.name] = time.monotonic()
        self._settle(host.name)
        self._act()

    def become(self, hosts: tuple[ModelHost, ...]) -> None:
        """Sets the models. Running work goes on; requests for removed models are refused.

        A host whose settings are those of one that there is stays unused.
        """
        there = {host.name: host for host in (*self.hosts.all(), *self.leaving.values())}
        wanted = {host.name: host for host in hosts}
        self.leaving = {name: host for name, host in there.items() if name not in wanted}
        for name in wanted.keys() & there.keys():
            if there[name].resize(wanted[name].config, self._drain_s):
                self._residency.add(name, there[name].num_bytes)
        self._successors = {
            name: host
            for name, host in wanted.items()
            if name in there and there[name].config != host.config
        }
        self.hosts = Models(tuple(there.get(name, host) for name, host in wanted.items()))
        for name in wanted.keys() - there.keys():
            self._residency.add(name, wanted[name].num_bytes)
        for name in self.leaving:
            for ticket in self._residency.send_away(name):
                self._tell(ticket, self.hosts.unknown(name))
        for name in (*self.leaving, *self._successors):
            if name in self.leaving:
                self.unload(there[name])
            else:  # one that is being loaded leaves once it is there
                self._residency.send_out(name)
            self._settle(name)
        self._act()

    def is_changing(self, host: ModelHost) -> bool:
        """Whether the model will be loaded anew, with other settings."""
        return host.name in self._successors

    def _settle(self, name: str) -> None:
        """Removes or replaces a model that is to leave, once nothing of it runs."""
        if name not in self.leaving and name not in self._successors:
            return
        if not self._residency.is_gone(name):
            return
        if (dropped := self.leaving.pop(name, None)) is not None:
            self._residency.remove(name)
            self.on_gone(dropped)
            return
        old, new = self._host(name), self._successors.pop(name)
        self.hosts = Models(tuple(new if host is old else host for host in self.hosts.all()))
        self._residency.add(name, new.num_bytes)
        self.on_gone(old)
        if old.engine.num_starts:
            self.need(new)

    def _host(self, name: str) -> ModelHost:
        return self.leaving.get(name) or self.hosts.get(name)

    def need(self, host: ModelHost) -> None:
        """Brings it in when its turn comes; nobody waits, and a failure is told by `on_lost`."""
        self._after_load.discard(host.name)
        if self._residency.stage(host.name) not in (Stage.IN, Stage.LOADING):
            self._spawn(self._bring(host))

    async def load(self, host: ModelHost) -> None:
        """Brings it in; RequestError if that fails."""
        await self._enter(host, is_used=False)
        self.release(host)

    def unload(self, host: ModelHost) -> None:
        """Sends it out once its streams have ended; a load is given up if nobody waits for it."""
        if self._residency.stage(host.name) is not Stage.LOADING:
            self._residency.send_out(host.name)
        elif self._is_wanted(host.name):
            self._after_load.add(host.name)
        else:
            self._spawn(host.engine.close())
        self._act()

    def _is_wanted(self, name: str) -> bool:
        tickets = self._residency.waiting(name)
        return self._residency.is_used(name) or any(it not in self._unused for it in tickets)

    def replace(self, host: ModelHost, replica: int) -> None:
        """Puts a fresh engine in the place of one of several; its streams have time to end."""
        self._spawn(host.engine.replace(replica, self._drain_s))

    def refuse(self, error: RequestError) -> None:
        """Sends all away who wait, and all who come."""
        self._refusal = error
        for waited in list(self._waiting.values()):
            if not waited.done():
                waited.set_exception(error.with_traceback(None))

    async def close(self) -> None:
        """Ends all engines."""
        self.refuse(RequestError("server_shutdown", "The server is shutting down."))
        every = (*self.hosts.all(), *self.leaving.values())
        await asyncio.gather(*(host.engine.close() for host in every))
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

    async def _bring(self, host: ModelHost) -> None:
        await _unless_refused(self.load(host))  # waiting requests get the error

    def check_line(self) -> None:
        """RequestError if as many wait for models as may."""
        if len(self._waiting) >= self._max_waiting:
            message = f"{len(self._waiting)} requests wait for models, and --max-num-queued-reqs "
            message += f"is {self._max_waiting}; try again later."
            raise RequestError("server_overloaded", message, retry_after_s=_OVERLOADED_RETRY_S)

    async def _enter(self, host: ModelHost, is_used: bool = True) -> None:
        if not host.is_here:
            await self.read(host)
        if self._refusal is not None:
            raise self._refusal.with_traceback(None)
        host = self._host(host.name)  # RequestError if it was dropped meanwhile
        ticket = self._residency.ask(host.name)
        waited = self._waiting[ticket] = asyncio.get_running_loop().create_future()
        if not is_used:
            self._unused.add(ticket)
        self._act()
        try:
            await waited
        except BaseException:
            if waited.done() and not waited.cancelled() and waited.exception() is None:
                self.release(host)
            raise
        finally:
            del self._waiting[ticket]
            self._unused.discard(ticket)
            self._residency.leave(ticket)
            self._act()

    async def read(self, host: ModelHost) -> None:
        """Reads all of a model but its weights, after a download; RequestError if that fails."""
        try:
            await host.read()
        except ModelError as error:
            host.engine.fail(str(error))
            self._say_lost(host, error.code)
            raise _failed(host, error.code) from error
        self._residency.add(host.name, host.num_bytes)

    def _act(self) -> None:
        if self._refusal is not None:
            return
        while (move := self._residency.next_move()) is not None:
            host = self._host(move.model)
            if move.kind == "load":
                self._spawn(self._load(host))
            elif move.kind == "unload":
                self._spawn(self._unload(host))
            elif move.kind == "refuse":
                host.engine.fail(_too_large(host, self._config.models_memory_bytes or 0))
                self._say_lost(host, "model_too_large")
                self._tell(move.ticket, _failed(host, "model_too_large"))
            elif (waited := self._waiting.get(move.ticket)) and not waited.done():
                waited.set_result(None)
            else:  # stopped, and about to leave
                self._residency.release(host.name)

    async def _load(self, host: ModelHost) -> None:
        self._say("Loading %s", host.name)
        try:
            host.engine.state = "loading"
            await host.read()
            if self._refusal is not None:
                return
            host.begin()
            self._spawn(self._hear(host))
            await host.engine.settled()
        except EngineClosed:
            self._lose(host, "unloaded")
            return
        except Exception as error:
            if not isinstance(error, ModelError):
                logger.exception("%s could not be loaded", host.name)
            host.engine.fail(str(error))
            self._lose(host, getattr(error, "code", "load_failed"))
            return
        if host.model.sampling_words:
            self._say("%s", host.model.sampling_words)
        self._residency.loaded(host.name)
        self._residency.add(host.name, host.num_bytes)  # now it is known
        self._on_loaded(host)
        self._rested_at[host.name] = time.monotonic()
        if host.name in self.leaving or host.name in self._successors:
            self._residency.send_out(host.name)  # loaded for streams that it had left
        self._act()
        if host.name in self._after_load:
            self._after_load.remove(host.name)
            self.unload(host)

    async def _hear(self, host: ModelHost) -> None:
        await host.engine.run()
        if host.engine.state == "dead" and self._residency.stage(host.name) is Stage.IN:
            self._lose(host, "engine_failed")
        elif host.engine.state != "dead" and self.is_sole:
            self.ended.set()

    def _lose(self, host: ModelHost, code: str) -> None:
        self._say_lost(host, code)
        tickets = self._residency.lost(host.name)
        self._after_load.discard(host.name)
        if host.engine.state == "dead":
            self._on_lost(host)
        for ticket in tickets:
            self._tell(ticket, _failed(host, code))
        if self.is_sole:
            self.ended.set()
        self._settle(host.name)
        self._act()

    def _tell(self, ticket: int, error: RequestError) -> None:
        waited = self._waiting.get(ticket)
        if waited is not None and not waited.done():
            waited.set_exception(error)

    def _say(self, line: str, *arguments: str) -> None:
        """Writes to the log; of a server's only model, the server itself speaks."""
        if not self.is_sole:
            logger.info(line, *arguments)

    def _say_lost(self, host: ModelHost, code: str) -> None:
        """Why; clients hear the code alone, and that the log has the rest."""
        if not self.is_sole:
            level = logging.ERROR if host.engine.state == "dead" else logging.INFO
            words = (host.name, code, host.engine.last_words)
            logger.log(level, "%s is not served now (%s). %s", *words)

    async def _unload(self, host: ModelHost) -> None:
        self._say("Unloading %s", host.name)
        await host.engine.close()
        self._residency.unloaded(host.name)
        self._settle(host.name)
        self._act()

    async def _unload_idle(self, after_s: float) -> None:
        while True:
            due = time.monotonic() + min(_LOOK_INTERVAL_S, after_s)
            await asyncio.sleep(due - time.monotonic())
            if (late_s := time.monotonic() - due) > STOPPED_S:  # nobody could have asked
                self._rested_at = {name: at + late_s for name, at in self._rested_at.items()}
            for name in self._residency.idle():
                if time.monotonic() >= self._rested_at.get(name, 0) + after_s:
                    self.unload(self._host(name))


def is_sole(config: ServerConfig) -> bool:
    """Whether the server has one model, which is loaded at the start, and stays."""
    is_one = len(config.models) == 1 and config.loading.models_dir is None
    return is_one and config.models[0].min_replicas != 0


async def _nothing() -> None:
    """Does nothing: the set of models does not change by itself."""


async def _unless_refused(work: Awaitable[None]) -> None:
    """Awaits work that nobody waits for; the log says why it failed."""
    with contextlib.suppress(RequestError):
        await work


def _failed(host: ModelHost, code: str) -> RequestError:
    message = f"The model {host.name!r} could not be loaded ({code})"
    return RequestError("load_failed", f"{message}; the server's log says why.", "model")


def _too_large(host: ModelHost, limit: int) -> str:
    return (
        f"{host.name} takes about {host.num_bytes >> 20} MiB with its cache, and "
        f"--models-memory-bytes allows {limit >> 20} MiB; raise it, or lower "
        "--kv-cache-memory-bytes."
    )
