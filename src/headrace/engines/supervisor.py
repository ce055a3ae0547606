"""Implements EngineClient for an engine process: starts, pings and restarts it, or gives up."""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable
from typing import Protocol

import msgspec

from headrace.engines.backoff import Backoff
from headrace.engines.child import Child
from headrace.engines.client import EngineDown, EngineUp, NewsQueue
from headrace_common import wire
from headrace_common.config.settings import ModelConfig
from headrace_common.messages import (
    AdapterRead,
    Cancel,
    DropAdapter,
    LoadAdapter,
    LoadFailed,
    Loading,
    Message,
    Outputs,
    Ping,
    Pong,
    Ready,
    Shutdown,
    Status,
    Submit,
)
from headrace_common.system import awake
from headrace_common.system.panics import STEERING
from headrace_common.system.step_record import StepRecord
from headrace_common.wire import AnyMessage, Start

logger = logging.getLogger(__name__)

MAX_FAILED_STARTS = 3
PING_INTERVAL_S = 1.0
MAX_SILENT_PINGS = 10
# If this event loop wakes up this many seconds late, the loop can be the reason for the engine's
# silence.
_LATE_S = 0.5
_STOP_S = 5.0

Spawn = Callable[[int, tuple[int, ...]], Awaitable[Child]]


class Supervisor:
    """Owns the engine process and each process that replaces it.

    `news` ends when the supervisor's only task ends.
    """

    def __init__(
        self,
        config: ModelConfig,
        load_timeout_s: float,
        number: int = 0,
        lock_fds: tuple[int, ...] = (),
        spawn: Spawn = Child.spawn,
    ) -> None:
        """Start the engine in a task.

        `number` is the engine's index among the engines of this server. `lock_fds` are descriptors
        of lock files. The server's engines use the locks to take turns. `spawn` starts a process.
        """
        self._number, self._lock_fds, self._spawn = number, lock_fds, spawn
        self._config = config
        self._load_timeout_s = load_timeout_s
        self.news = NewsQueue()
        self._child: Child | None = None
        self._is_ready = False
        self._closing = asyncio.Event()
        # The time of the engine's death; None while an engine is ready, and before the first death.
        self._died_at: float | None = None
        self._task = asyncio.create_task(self._run(), name="supervisor")
        self._task.add_done_callback(self._has_ended)

    def submit(self, submit: Submit) -> None:
        self._send(submit)

    def cancel(self, cancel: Cancel) -> None:
        self._send(cancel)

    def adapt(self, message: LoadAdapter | DropAdapter) -> None:
        self._send(message)

    @property
    def pid(self) -> int | None:
        """Return the engine's process id; None while no engine is ready."""
        return self._child.pid if self._child and self._is_ready else None

    async def close(self) -> None:
        self._closing.set()
        # `_live_once` forgets the child during the wait, although its process may still run.
        if (child := self._child) is not None:
            if self._is_ready:
                child.send(Shutdown())
                await asyncio.wait([self._task], timeout=_STOP_S)
            if not self._task.done():
                child.kill()
        # If the task failed, the reader of `news` gets the error.
        await asyncio.wait([self._task])

    def _send(self, message: Message) -> None:
        """Send a message if the engine is ready.

        Otherwise the message is dropped, because callers submit again after EngineUp.
        """
        if self._child is not None and self._is_ready:
            self._child.send(message)

    def _has_ended(self, task: asyncio.Task[None]) -> None:
        """End `news`. After a failure or a cancel, the reader of `news` gets the error."""
        cancelled = asyncio.CancelledError("The supervisor was cancelled")
        self.news.end(cancelled if task.cancelled() else task.exception())

    async def _run(self) -> None:
        num_failed_starts, backoff = 0, Backoff()
        was_up = False
        clock = asyncio.get_running_loop().time
        while not self._closing.is_set():
            started_at = clock()
            is_up, down = await self._live_once()
            if down is None:
                break
            was_up = was_up or is_up
            if is_up:
                num_failed_starts = 0
            elif not down.from_outside:
                num_failed_starts += 1
            pause_s = backoff.after(clock() - started_at if is_up else 0.0)
            if num_failed_starts >= (MAX_FAILED_STARTS if was_up else 1):
                self.news.put(msgspec.structs.replace(down, given_up=True))
                break
            logger.warning("%s Restarting the engine.", down.message)
            if self._died_at is None:
                self._died_at = clock()
            self.news.put(down)
            await self._pause(pause_s)

    def _log_recovery(self) -> None:
        """Log that an engine is ready again, if a death was logged."""
        if self._died_at is not None:
            seconds = asyncio.get_running_loop().time() - self._died_at
            logger.info("The engine is up again after %.1f s.", seconds)
            self._died_at = None

    async def _live_once(self) -> tuple[bool, EngineDown | None]:
        """Run one engine process. Return whether the engine became ready, and how it died.

        The second value is None if the supervisor was closed.
        """
        try:
            self._child = child = await self._spawn(self._number, self._lock_fds)
        # The system lacks descriptors, memory or processes, perhaps only for a short time.
        except OSError as error:
            words = f"The system could not start an engine process: {error}."
            return False, EngineDown("engine_failed", words, given_up=False, from_outside=True)
        if self._closing.is_set():
            # `close` ran during the spawn and found no child to kill.
            child.kill()
        child.send(Start(self._config))
        try:
            first = await self._first(child)
            if isinstance(first, Ready):
                self._is_ready = True
                self._log_recovery()
                self.news.put(EngineUp(first, child.pid))
                await self._follow(child)
        finally:
            was_ready, self._is_ready, self._child = self._is_ready, False, None
            await child.end()
        if self._closing.is_set():
            return was_ready, None
        if isinstance(first, LoadFailed):
            return False, EngineDown(first.code, first.message, given_up=False)
        return was_ready, child.death_report()

    async def _first(self, child: Child) -> AnyMessage | None:
        """Wait for Ready or LoadFailed. Return None if the process ended or was too slow."""
        with contextlib.suppress(TimeoutError):
            async with awake.within(self._load_timeout_s):
                while isinstance(message := await wire.read(child.reader), Loading):
                    self.news.put(message)
                return message
        return None

    async def _follow(self, child: Child) -> None:
        """Forward the messages of a ready engine until it ends, and ping the engine meanwhile."""
        pulse = PingMonitor(child)
        async with asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(pulse.watch(), name="ping")
            # Use a separate task, so that a message does not resume the coroutines around the task.
            await tasks.create_task(self._pass_on(child, pulse), name="engine news")
            watching.cancel()

    async def _pass_on(self, child: Child, pulse: "PingMonitor") -> None:
        """Forward messages until the engine ends. This loop runs for every token."""
        while (message := await wire.read(child.reader)) is not None:
            if isinstance(message, Outputs):
                try:
                    self.news.deliver(message)
                except STEERING:
                    raise
                # An error in a callback ends the task that reads `news`, but not the engine.
                except BaseException as error:
                    self.news.end(error)
            elif isinstance(message, Status | AdapterRead):
                self.news.put(message)
            elif isinstance(message, Pong):
                pulse.beats()

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closing.wait()


class Pingable(Protocol):
    """The part of Child that PingMonitor needs."""

    step_record: StepRecord

    def send(self, message: Message) -> None: ...

    def kill(self) -> None: ...


class PingMonitor:
    """Tracks whether an engine answers pings.

    A silent interval does not count if this process's event loop was late.
    """

    def __init__(self, child: Pingable) -> None:
        self._child = child
        self._num_silent = 0
        self._awake_since = -math.inf  # monotonic time in seconds

    def beats(self) -> None:
        """Record that the engine has answered."""
        self._num_silent = 0

    async def watch(self) -> None:
        """Watch until the engine hangs, then kill it.

        The engine hangs if it leaves MAX_SILENT_PINGS pings in a row unanswered. It also hangs if
        its step record says that a step is overdue. If this loop wakes up late, this process was
        slow or suspended (SIGSTOP, a sleeping laptop). The engine was then probably suspended too.
        The interval is therefore not counted, and a step from before the suspension is not overdue.
        """
        clock = asyncio.get_running_loop().time
        number = 0
        while not (self._num_silent >= MAX_SILENT_PINGS or self._is_overdue()):
            number += 1
            due = clock() + PING_INTERVAL_S
            self._child.send(Ping(number))
            await asyncio.sleep(PING_INTERVAL_S)
            late_s = clock() - due
            if late_s < _LATE_S:
                self._num_silent += 1
            # The engine was most likely suspended together with this process.
            elif late_s > awake.STOPPED_S:
                self._awake_since = time.monotonic()
        logger.error("The engine does not respond and is killed")
        self._child.kill()

    def _is_overdue(self) -> bool:
        return self._child.step_record.is_overdue(time.monotonic(), self._awake_since)
