"""What generation knows of an engine: submit, cancel, outputs, status, close."""

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

import msgspec

from headrace.core.messages import Cancel, Outputs, Ready, Status, Submit


class EngineUp(msgspec.Struct, frozen=True):
    """An engine has loaded: at first, and again after each restart, then knowing nothing."""

    ready: Ready


class EngineDown(msgspec.Struct, frozen=True):
    """The engine has died with all it knew. It is started again unless it was `given_up`.

    `message` has the reason and its last words.
    """

    code: str
    message: str
    given_up: bool


EngineNews = Outputs | EngineUp | EngineDown


class EngineClient(Protocol):
    """One engine, in this process or in another."""

    def submit(self, submit: Submit) -> None:
        """Hands over a stream's sequences; what becomes of them comes with the outputs."""

    def cancel(self, cancel: Cancel) -> None:
        """Ends sequences; unknown ones are ignored."""

    def outputs(self) -> AsyncIterator[EngineNews]:
        """News in order, until the client is closed. One reader."""

    @property
    def status(self) -> Status:
        """The newest numbers that the engine sent."""

    async def close(self) -> None:
        """Ends the engine; what still runs is dropped."""


IDLE = Status(
    num_running=0,
    num_waiting=0,
    num_waiting_tokens=0,
    blocks_free=0,
    slots_free=0,
    num_steps=0,
)


class News:
    """The queue behind `outputs()`; filled on the event loop's thread."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[EngineNews | None] = asyncio.Queue()

    def put(self, news: EngineNews) -> None:
        self._queue.put_nowait(news)

    def end(self) -> None:
        self._queue.put_nowait(None)

    async def __aiter__(self) -> AsyncIterator[EngineNews]:
        while (news := await self._queue.get()) is not None:
            yield news
