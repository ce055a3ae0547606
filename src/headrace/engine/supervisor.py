"""Keeps one engine process alive: start, ping, restart with backoff, give up; an EngineClient."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

import msgspec

from headrace.core.config import ModelConfig
from headrace.core.messages import (
    AnyMessage,
    Cancel,
    LoadFailed,
    Message,
    Outputs,
    Ping,
    Pong,
    Ready,
    Shutdown,
    Start,
    Status,
    Submit,
)
from headrace.engine.child import Child
from headrace.engine.client import EngineDown, EngineNews, EngineUp, News

logger = logging.getLogger(__name__)

MAX_FAILED_STARTS = 3
PING_INTERVAL_S = 1.0
PING_TIMEOUT_S = 10.0
MAX_STEP_S = 120.0
_BACKOFF_S = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
_CALM_S = 60.0  # so long without a death, and the next restart is at once again
_STOP_S = 5.0


class Supervisor:
    """Owns the engine process and whoever follows it. `run` is its one task."""

    def __init__(self, config: ModelConfig, load_timeout_s: float) -> None:
        self._config = config
        self._load_timeout_s = load_timeout_s
        self._news = News()
        self._child: Child | None = None
        self._is_ready = False
        self._closing = asyncio.Event()
        self._last_pong = 0.0
        self._task = asyncio.create_task(self._run(), name="supervisor")

    def submit(self, submit: Submit) -> None:
        self._send(submit)

    def cancel(self, cancel: Cancel) -> None:
        self._send(cancel)

    def outputs(self) -> AsyncIterator[EngineNews]:
        return aiter(self._news)

    @property
    def pid(self) -> int | None:
        """Process id while an engine is ready."""
        return self._child.pid if self._child and self._is_ready else None

    async def close(self) -> None:
        self._closing.set()
        if self._child is not None:
            if self._is_ready:
                self._child.send(Shutdown())
                await asyncio.wait([self._task], timeout=_STOP_S)
            if not self._task.done():
                self._child.kill()
        await self._task

    def _send(self, message: Message) -> None:
        """To the ready engine; without one, whoever hears of EngineUp submits again."""
        if self._child is not None and self._is_ready:
            self._child.send(message)

    async def _run(self) -> None:
        num_failed_starts = num_deaths = 0
        was_up = False
        clock = asyncio.get_running_loop().time
        while not self._closing.is_set():
            started_at = clock()
            is_up, down = await self._live_once()
            if down is None:
                break
            was_up = was_up or is_up
            num_failed_starts = 0 if is_up else num_failed_starts + 1
            num_deaths = 1 if is_up and clock() - started_at > _CALM_S else num_deaths + 1
            if num_failed_starts == MAX_FAILED_STARTS or not was_up:
                self._news.put(msgspec.structs.replace(down, given_up=True))
                break
            logger.warning("%s It is started again.", down.message)
            self._news.put(down)
            await self._pause(_BACKOFF_S[min(num_deaths, len(_BACKOFF_S)) - 1])
        self._news.end()

    async def _live_once(self) -> tuple[bool, EngineDown | None]:
        """One life of an engine: whether it became ready, and its death (None: closed)."""
        self._child = child = await Child.spawn()
        if self._closing.is_set():
            child.kill()  # it was spawned while `close` found no child to end
        child.send(Start(self._config))
        messages = child.messages()
        try:
            first = await self._first(messages)
            if isinstance(first, Ready):
                self._is_ready = True
                self._news.put(EngineUp(first))
                await self._follow(child, messages)
        finally:
            was_ready, self._is_ready, self._child = self._is_ready, False, None
            await child.end()
        if self._closing.is_set():
            return was_ready, None
        if isinstance(first, LoadFailed):
            return False, EngineDown(first.code, first.message, given_up=False)
        return was_ready, child.obituary()

    async def _first(self, messages: AsyncIterator[AnyMessage]) -> AnyMessage | None:
        """Ready or LoadFailed; None if the process ended or took too long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._load_timeout_s):
                return await anext(messages, None)
        return None

    async def _follow(self, child: Child, messages: AsyncIterator[AnyMessage]) -> None:
        """Passes on what a ready engine says, until it has ended."""
        pinging = asyncio.create_task(self._ping(child), name="ping")
        try:
            async for message in messages:
                if isinstance(message, Outputs | Status):
                    self._news.put(message)
                elif isinstance(message, Pong):
                    self._last_pong = asyncio.get_running_loop().time()
        finally:
            pinging.cancel()

    async def _ping(self, child: Child) -> None:
        """Kills an engine that does not answer; `_follow` then sees its end."""
        clock = asyncio.get_running_loop().time
        self._last_pong = clock()
        number = 0
        while clock() - self._last_pong < PING_TIMEOUT_S and child.note.running_s() < MAX_STEP_S:
            number += 1
            child.send(Ping(number))
            await asyncio.sleep(PING_INTERVAL_S)
        logger.error("The engine hangs and is killed")
        child.kill()

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closing.wait()
