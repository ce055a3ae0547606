"""The far side of an engine on a Ray cluster: a supervisor and its engine process, on some node.

Runs in an actor's process and knows nothing of Ray. The engine stays a process of its own here, as
on the gateway's machine, so that its step record and last words outlive it: who was in the fatal
step is known, and most deaths are dealt with on the spot. If the actor's process or its node dies,
the engine's socket closes, and the engine with it.
"""

import asyncio
import contextlib
import logging
import os
import socket
import time

import msgspec

from headrace.engines.client import EngineDown, EngineUp
from headrace.engines.supervisor import Supervisor
from headrace_common.config.settings import ModelConfig
from headrace_common.messages import (
    AdapterRead,
    Cancel,
    DropAdapter,
    LoadAdapter,
    Loading,
    Outputs,
    Status,
    Submit,
)
from headrace_common.version import __version__

WAIT_S = 1.0
"""The longest that `take` waits: an empty answer is a sign of life."""


ToEngine = Submit | Cancel | LoadAdapter | DropAdapter


class Sent(msgspec.Struct, frozen=True):
    """Messages that the gateway sends at once, in order. `now` is its monotonic time."""

    now: float
    messages: tuple[ToEngine, ...]


class Up(msgspec.Struct, frozen=True, tag=True):
    """An EngineUp, as it travels."""

    news: EngineUp


class Down(msgspec.Struct, frozen=True, tag=True):
    """An EngineDown, as it travels."""

    news: EngineDown


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The supervisor itself has failed."""

    message: str


AnyNews = Outputs | Status | Loading | AdapterRead | Up | Down | Failed

encode = msgspec.msgpack.Encoder().encode
news_of = msgspec.msgpack.Decoder(tuple[AnyNews, ...]).decode
_sent_of = msgspec.msgpack.Decoder(Sent).decode


class EngineActor:
    """Its calls are coroutines of one event loop, as those of an asynchronous actor are."""

    def __init__(self, config: bytes, load_timeout_s: float) -> None:
        self._config = msgspec.msgpack.decode(config, type=ModelConfig)
        self._load_timeout_s = load_timeout_s
        self._supervisor: Supervisor | None = None
        self._untaken: list[AnyNews] = []
        self._has_news = asyncio.Event()
        self._hearing: asyncio.Task[None] | None = None

    async def begin(self) -> tuple[str, str]:
        """Starts the engine; returns the node's name and Headrace's version there."""
        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
        # Ray sets it for its own sake; the engine's threads are set by the configuration
        os.environ.pop("OMP_NUM_THREADS", None)
        if self._supervisor is None:
            self._supervisor = Supervisor(self._config, self._load_timeout_s)
            self._hearing = asyncio.create_task(self._hear(self._supervisor))
        return socket.gethostname(), __version__

    async def put(self, sent: bytes) -> None:
        """Messages for the engine, a Sent."""
        assert self._supervisor is not None
        batch = _sent_of(sent)
        offset = time.monotonic() - batch.now  # clocks of two machines
        for message in batch.messages:
            if isinstance(message, Cancel):
                self._supervisor.cancel(message)
            elif isinstance(message, LoadAdapter | DropAdapter):
                self._supervisor.adapt(message)
            else:
                arrival = message.arrival + offset
                self._supervisor.submit(msgspec.structs.replace(message, arrival=arrival))

    async def take(self) -> bytes:
        """News since the last call, a tuple of AnyNews; empty if there is none for WAIT_S."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WAIT_S):
                await self._has_news.wait()
        taken, self._untaken = tuple(self._untaken), []
        self._has_news.clear()
        return encode(taken)

    async def close(self) -> None:
        """Ends the engine."""
        if self._supervisor is not None:
            await self._supervisor.close()

    async def _hear(self, supervisor: Supervisor) -> None:
        try:
            async for news in supervisor.news:
                if isinstance(news, EngineUp):
                    self._say(Up(news))
                elif isinstance(news, EngineDown):
                    self._say(Down(news))
                elif isinstance(news, Outputs | Status | Loading):
                    self._say(news)
        except RuntimeError as error:
            self._say(Failed(f"{error}: {error.__cause__}"))

    def _say(self, news: AnyNews) -> None:
        self._untaken.append(news)
        self._has_news.set()
