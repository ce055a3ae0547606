"""A run: a machine with a server, its clients, its operator, and what goes wrong."""

import asyncio
import contextlib
import logging
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar

from detangle import choice, flip, randint, uniform

from headrace.fleet.fleet import pinned_model
from headrace.fleet.served_model import ServedModel
from headrace.streams.log import LogGone
from headrace.streams.stores.sqlite import SqliteStore
from headrace_common.config.settings import HttpConfig, ModelConfig, ServerConfig, StreamConfig
from stress.simulated_server import faults as fault_rates
from stress.simulated_server.disk import Disk, stored_events
from stress.simulated_server.http import ADMIN_KEY, CLIENT_KEYS, Broken, Connection
from stress.simulated_server.processes import SimChild
from stress.simulated_server.requests import MODEL, Request
from stress.simulated_server.requests import draw as draw_request
from stress.simulated_server.server import Machine, SimServer
from stress.simulated_server.system import PROCESS, world_loop

T = TypeVar("T")

PATIENCE_S = 1800.0
"""The virtual time within which every client must be done. Faults may last for some of it."""
SILENCE_S = 15.0
"""Clients treat a connection as dead after this time without a byte, as the docs advise."""
STOP_S = 120.0
"""The virtual time within which a server must stop after its signal."""

MAX_STEPS = 1500
"""The most steps until an operator strikes. Most runs have a few thousand."""
COMMITS_S = 30.0
"""The longest wait for a commit."""


class Wrong(AssertionError):
    """Raised for an answer that nothing excuses, not even lost writes."""


Client = Callable[["World"], Coroutine[Any, Any, None]]


class World:
    """Everything in one run. Clients and operators are coroutines that take the world."""

    has_failovers = False

    def __init__(self, folder: Path, model: ServedModel) -> None:
        self.story: list[tuple[float, str]] = []
        self.faults = fault_rates.draw(self.tell)
        self.folder, self.model = folder, model
        self.machine = Machine(
            folder, self._config(), model, self.faults, on_engine=self.engine_starts
        )
        # How many answers were compared with the reference, and other things worth counting.
        self.counts: Counter[str] = Counter()
        self._num_requests = 0
        # Messages with a traceback for a stream that Redis has lost, which is no bug of the server.
        self.tracebacks: list[str] = []
        # Set at the end, when nothing may go wrong any more.
        self.is_calm = False
        # Ids of stored streams, each with the events that a client has read.
        self.reads: list[tuple[str, list[dict[str, Any]]]] = []
        # The score of each pair of a query and a document.
        self.scores: dict[tuple[str, str], float] = {}

    def _config(self) -> ServerConfig:
        streams = StreamConfig(
            linger_s=choice((0.0, 1.0, 3.0)),
            drain_s=choice((0.0, 2.0, 30.0)),
            max_num_queued_reqs=choice((512, 2)),
            keep_streams_hours=choice((24.0,) * 19 + (0.1,)),
            return_progress_for=choice(((), (), ("key:nobody=off", "agent:*=on"))),
        )
        keys = choice(((), CLIENT_KEYS))
        http = HttpConfig(api_key=keys, admin_key=ADMIN_KEY if keys else None)
        return ServerConfig(models=(ModelConfig(model=MODEL),), streams=streams, http=http)

    def engine_starts(self, engine: SimChild) -> None:
        """Check the engines of the machine when another one starts."""

    @property
    def server(self) -> SimServer | None:
        """The running server; None, or a server that has ended, while there is none."""
        return self.machine.server

    @property
    def is_up(self) -> bool:
        server = self.server
        return server is not None and server.app is not None and not server.has_ended.is_set()

    async def until_up(self) -> None:
        """Wait until a server accepts requests, so that the next request is one of its first."""
        while not self.is_up:
            server = self.server
            if server is None or server.has_ended.is_set():
                await self.machine.starts.wait()
                continue
            # A server that accepts no more requests is about to end.
            ways = [server.has_ended] if server.accepts.is_set() else [server.accepts]
            waits = [asyncio.create_task(it.wait()) for it in (*ways, server.has_ended)]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()

    def tell(self, text: str) -> None:
        """Add a line to the story of this run, which is printed if the run fails."""
        self.story.append((world_loop().time(), text))

    @property
    def expires(self) -> bool:
        """Return whether ended streams are deleted during the run."""
        return self.machine.config.streams.keep_streams_hours < 1.0

    def kill(self) -> None:
        """Kill the server or cut the machine's power, and check what is stored."""
        if flip(0.3):
            self.faults.note("machine: power cut")
            self.machine.cut_power()
        else:
            self.faults.note("server: killed")
            self.machine.kill()
        self.check_stored()

    def check_stored(self) -> None:
        """Check that the disk has each event that a client has received."""
        if self.machine.redis:
            return
        stored = stored_events(self.machine.disk)
        for stream_id, events in self.reads:
            if self.expires and events and events[-1]["kind"] in ("finish", "error"):
                continue
            log = stored.get(stream_id, [])
            for event, kept in zip_longest(events, log[: len(events)]):
                assert event == kept, f"{stream_id}: {event} was sent, but {kept} is stored"
            self.counts["streams compared with the disk"] += 1

    def new_request(self) -> Request:
        self._num_requests += 1
        return draw_request(self._num_requests)

    def compare(self, request: Request, text: str, finish_reason: str, choice: int = 0) -> None:
        """Check an answer against the reference."""
        answer = request.answer(self.model.tokenizer, choice)
        found = (text, finish_reason)
        if found != answer[:2]:
            raise Wrong(f"{request.key}: {found} instead of {answer[:2]}")
        self.counts["answers"] += 1

    def has_lost(self, *texts: str) -> bool:
        """Return whether a failover has lost writes for one of the ids in these texts."""
        return False

    def may_fail(self, code: str) -> bool:
        """Return whether a stream may end with this error, given the faults of this run."""
        happened = self.faults.injected
        reasons = {
            "engine_failed": (
                "engine: death in a step",
                "engine: step error",
                "engine: hangs in a step",
                "engine: hangs between two steps",
                "engine: load failed",
                "disk: model cannot be read",
            ),
            "load_failed": (
                "engine: load failed",
                "engine: adapter cannot be read",
                "disk: model cannot be read",
            ),
            "internal_error": ("engine: step error", "worker: death in a job"),
            "template_failed": ("worker: job exceeds its limits",),
            "request_too_large": ("worker: job exceeds its limits",),
            "poison_request": ("engine: death in a step", "engine: hangs in a step"),
            # A hanging step is noticed after ten minutes, like the longest wait in the queue.
            "queue_timeout": ("engine: hangs in a step",),
        }
        return any(happened[reason] for reason in reasons.get(code, ()))

    def troubles(self) -> object:
        """Return the faults of engines and servers so far. After each, clients start again."""
        kinds = ("engine: ", "server: ", "machine: ")
        happened = {kind: it for kind, it in self.faults.injected.items() if kind.startswith(kinds)}
        return self.server, happened

    @property
    def has_steady_engine(self) -> bool:
        """Return whether an engine runs and is not in a step that is slow or never ends."""
        server = self.server
        if server is None or not self.is_up:
            return False
        engines = server.engines()
        return bool(engines) and all(it.has_loaded and not it.is_stuck for it in engines)

    async def in_time(
        self, connection: Connection, work: Awaitable[T], seconds: float = SILENCE_S
    ) -> T:
        """Return the result of `work`, which waits for bytes; an open connection is never silent.

        Raises Broken if the server has ended.
        """
        server = self.server
        try:
            async with asyncio.timeout(seconds):
                return await work
        except TimeoutError:
            if server is None or server.has_ended.is_set():
                raise Broken from None
            name = connection.task.get_name()
            raise AssertionError(f"{name}: no byte for {seconds:g} s") from None

    async def run(self, clients: Sequence[Client], operators: Sequence[Client]) -> None:
        """Run clients and operators to their ends, then check that nothing is left over."""
        world_loop().job_delay_s = self._job_delay_s
        self.machine.start()
        operating = [asyncio.create_task(it(self), name="operator") for it in operators]
        asking = [asyncio.create_task(it(self), name="client") for it in clients]
        try:
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.gather(*asking)
        except TimeoutError:
            _raise_failure(operating)
            raise AssertionError(f"clients are not done after {PATIENCE_S:g} s") from None
        self.faults.stop()
        self.is_calm = True
        for task in operating:
            task.cancel()
        await asyncio.gather(*operating, return_exceptions=True)
        _raise_failure(operating)
        await self._finish()

    def _job_delay_s(self) -> float:
        if self.faults.hits("disk: slow job"):
            return uniform(0.01, 1.0)
        return uniform(9.0, 30.0) if self.faults.hits("disk: stalled job") else 0.0

    async def _finish(self) -> None:
        """Let a healthy server finish all streams, stop it, and look for what is left over."""
        server = self.server
        if server is None or server.has_ended.is_set():
            server = self.machine.start()
        try:
            async with asyncio.timeout(PATIENCE_S):
                await server.accepts.wait()
                while len(server.generation.streams):
                    await asyncio.sleep(1)
        except TimeoutError:
            endless = [stream.record.id for stream in server.generation.streams]
            raise AssertionError(f"streams never end: {endless}") from None
        # Connections, cancels and acknowledgements that are under way may still arrive.
        await asyncio.sleep(20.0)
        check_nothing_is_kept(server)
        await self.stop(server)
        # Callbacks that are due at the end may still run.
        await asyncio.sleep(1.0)
        left = [it.get_name() for it in world_loop().living_tasks(server.process)]
        assert not left, f"tasks outlive the server: {left}"
        self.check_stored()

    async def stop(self, server: SimServer) -> None:
        """Stop a server like a signal does, and wait for its end."""
        server.stop()
        await self.ended(server)

    async def ended(self, server: SimServer) -> None:
        """Wait for the end of a server that was told to stop."""
        try:
            async with asyncio.timeout(STOP_S):
                await asyncio.wait([server.task])
        except TimeoutError:
            raise AssertionError(f"{server.process.name} does not stop") from None
        server.task.result()


def check_nothing_is_kept(server: SimServer) -> None:
    """Check that a server without requests and streams remembers none of them."""
    generation = server.generation
    jobs = generation.work._queue  # type: ignore[attr-defined]
    kept = Counter(
        {
            "requests": len(server.requests),
            "streams": len(generation.streams),
            "writers": len(generation.writers.tasks),
            "jobs": len(jobs) + len(jobs._running),
        }
    )
    for host in generation.fleet.hosts.all():
        for queue in generation.queues._by_host.get(host, ()):
            kept["places in a queue"] += queue.num_live + queue.num_waiting + queue.num_tokens
        users = host.users
        kept["users of an engine"] += len(users._users) + len(users._waiters)
        kept["sequences of an engine"] += len(users._owners) + len(users._readings)
        # The only model of a server stays in memory, so its uses are not counted.
        if (entry := generation.fleet._policy._models.get(host.name)) is not None:
            kept["uses of a model"] += entry.num_uses
    if isinstance(server.store, SqliteStore):
        # A stream whose engine was given up is kept for the model's next engine.
        waiting = {
            stored.record.id
            for streams in generation.resumption._kept.values()
            for stored, _ in streams
        }
        kept["open logs"] += len(server.store._live.keys() - waiting)
    assert not any(kept.values()), f"left although nothing runs: {+kept}"


async def kills_engines(world: World) -> None:
    """Kill a running engine from outside at random moments, whatever it does."""
    for _ in range(randint(0, 3)):
        await _some_time(30.0)
        if world.is_up and world.server is not None and (engines := world.server.engines()):
            world.faults.note("engine: killed from outside")
            choice(engines).die(-signal.SIGKILL)
            if pinned_model(world.server.config) is None and flip(0.4):
                lose_models(world)


def lose_models(world: World) -> None:
    """Let engines fail to load for a while, so that they are given up. The disk may stall, too."""
    seconds, disk = uniform(2.0, 10.0), world.machine.storage
    world.faults.note("engine: loads fail for a while")
    world.faults.loads_fail_until = world_loop().time() + seconds
    if flip(0.5):
        world.faults.note("disk: stalled")
        disk.trouble = "stalled"
        world_loop().call_later(seconds + uniform(0.0, 5.0), setattr, disk, "trouble", "")


async def _some_time(most_s: float) -> None:
    """Wait for a random time or for a random number of steps."""
    if flip(0.5):
        await asyncio.sleep(uniform(0.0, most_s))
    else:
        passed = asyncio.Event()
        world_loop().after_steps(randint(1, MAX_STEPS), passed.set)
        await passed.wait()


def _raise_failure(tasks: "Sequence[asyncio.Task[None]]") -> None:
    """Raise the error of a task that has failed."""
    for task in tasks:
        if task.done() and not task.cancelled() and (error := task.exception()):
            raise error


async def restarts(world: World) -> None:
    """Stop, kill and restart the server at random moments."""
    for _ in range(randint(0, 4)):
        if flip(0.4):
            await _kill_between_steps(world)
        else:
            await asyncio.sleep(uniform(0.0, 20.0))
        server = world.server
        assert server is not None
        if server.has_ended.is_set():
            world.tell("there is no server")
        elif flip(0.5):
            _kill(world)
        else:
            world.faults.note("server: stopped")
            server.stop()
            if flip(0.3):
                await asyncio.sleep(uniform(0.0, 3.0))
                world.faults.note("server: stopped twice")
                server.stop()
            await world.ended(server)
        await asyncio.sleep(uniform(0.0, 5.0))
        world.tell("the server starts")
        world.machine.start()


def _kill(world: World) -> None:
    server = world.server
    if server is not None and not server.has_ended.is_set() and not world.is_calm:
        world.kill()


async def _kill_between_steps(world: World) -> None:
    """Kill the server between two steps of whatever is going on, often during a commit."""
    most = MAX_STEPS
    if flip(0.5):
        await _some_commits(world.machine.storage)
        most = 20
    has_come = asyncio.Event()

    def strike() -> None:
        _kill(world)
        has_come.set()

    world_loop().after_steps(randint(1, most), strike)
    await has_come.wait()


async def _some_commits(disk: Disk) -> None:
    """Wait for the start of a random commit, but not for long."""
    has_come, num_left = asyncio.Event(), randint(1, 40)

    def begin() -> None:
        nonlocal num_left
        num_left -= 1
        if not num_left:
            has_come.set()

    disk.on_commit = begin
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(COMMITS_S):
            await has_come.wait()
    disk.on_commit = lambda: None


class StoryHandler(logging.Handler):
    """Adds the server's log to the story."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.INFO)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        process = PROCESS.get()
        name = process.name if process else "world"
        text = record.getMessage()
        if record.exc_info and isinstance(record.exc_info[1], LogGone):
            self._world.tracebacks.append(f"{name}: {text}")
        if fields := getattr(record, "fields", None):
            text += f" {fields.get('route')} {fields.get('outcome')}"
        if record.exc_info:
            text += f": {record.exc_info[1]!r}"
        self._world.tell(f"{name}: {text}")
