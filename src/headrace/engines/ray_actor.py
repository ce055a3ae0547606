"""The remote side of an engine on a Ray cluster: a supervisor and its engine process on one node.

The code runs in an actor's process but does not import Ray. As on the gateway's machine, the engine
is a separate process. Its step record and last stderr lines therefore survive the engine. The
supervisor can name the sequences of the step in which the engine died, and it restarts most dead
engines without the gateway. If the actor's process or its node dies, the engine's socket closes,
and the engine ends too.
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
"""The longest time in seconds that `take` waits for messages.

After this time `take` returns an empty answer, which shows that the actor is alive.
"""


ToEngine = Submit | Cancel | LoadAdapter | DropAdapter


class Sent(msgspec.Struct, frozen=True):
    """Messages that the gateway sends together, in order. `now` is the gateway's monotonic time."""

    now: float
    messages: tuple[ToEngine, ...]


class Up(msgspec.Struct, frozen=True, tag=True):
    """An EngineUp, tagged for the network."""

    news: EngineUp


class Down(msgspec.Struct, frozen=True, tag=True):
    """An EngineDown, tagged for the network."""

    news: EngineDown


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Reports that the supervisor failed."""

    message: str


AnyNews = Outputs | Status | Loading | AdapterRead | Up | Down | Failed

encode = msgspec.msgpack.Encoder().encode
news_of = msgspec.msgpack.Decoder(tuple[AnyNews, ...]).decode
_sent_of = msgspec.msgpack.Decoder(Sent).decode


class EngineActor:
    """Receives the gateway's remote calls. All calls are coroutines on one event loop."""

    def __init__(self, config: bytes, load_timeout_s: float) -> None:
        self._config = msgspec.msgpack.decode(config, type=ModelConfig)
        self._load_timeout_s = load_timeout_s
        self._supervisor: Supervisor | None = None
        self._untaken: list[AnyNews] = []
        self._has_news = asyncio.Event()
        self._following: asyncio.Task[None] | None = None

    async def begin(self) -> tuple[str, str]:
        """Start the engine; return the node's name and the Headrace version installed there."""
        logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
        # Ray sets OMP_NUM_THREADS for its tasks, but Headrace's settings decide the number of the
        # engine's threads.
        os.environ.pop("OMP_NUM_THREADS", None)
        if self._supervisor is None:
            self._supervisor = Supervisor(self._config, self._load_timeout_s)
            self._following = asyncio.create_task(self._follow_news(self._supervisor))
        return socket.gethostname(), __version__

    async def put(self, sent: bytes) -> None:
        """Pass the messages of an encoded Sent to the engine."""
        assert self._supervisor is not None
        batch = _sent_of(sent)
        # The monotonic clocks of the two machines differ.
        offset = time.monotonic() - batch.now
        for message in batch.messages:
            if isinstance(message, Cancel):
                self._supervisor.cancel(message)
            elif isinstance(message, LoadAdapter | DropAdapter):
                self._supervisor.adapt(message)
            else:
                arrival = message.arrival + offset
                self._supervisor.submit(msgspec.structs.replace(message, arrival=arrival))

    async def take(self) -> bytes:
        """Return the messages since the last call, as an encoded tuple.

        The tuple is empty if no news arrives within WAIT_S.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WAIT_S):
                await self._has_news.wait()
        taken, self._untaken = tuple(self._untaken), []
        self._has_news.clear()
        return encode(taken)

    async def close(self) -> None:
        """End the engine."""
        if self._supervisor is not None:
            await self._supervisor.close()

    async def _follow_news(self, supervisor: Supervisor) -> None:
        try:
            async for news in supervisor.news:
                if isinstance(news, EngineUp):
                    self._post(Up(news))
                elif isinstance(news, EngineDown):
                    self._post(Down(news))
                elif isinstance(news, Outputs | Status | Loading):
                    self._post(news)
        except RuntimeError as error:
            self._post(Failed(f"{error}: {error.__cause__}"))

    def _post(self, news: AnyNews) -> None:
        self._untaken.append(news)
        self._has_news.set()
