"""What generation knows of an engine: submit, cancel, outputs, status, close."""

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

import msgspec

from headrace.core.errors import EngineGone
from headrace.core.ids import SequenceId
from headrace.core.messages import Cancel, Outputs, Ready, Status, Submit


class EngineUp(msgspec.Struct, frozen=True):
    """An engine has loaded: at first, and again after each restart, then knowing nothing."""

    ready: Ready
    pid: int | None = None  # of a process of its own


class EngineDown(msgspec.Struct, frozen=True):
    """The engine has died with all it knew. It is started again unless it was `given_up`.

    `message` has the reason and its last words. `suspects` were in the step that it died in;
    `from_outside` means that somebody killed it, or that the system had no process to give: no
    proof against them, nor against the model.
    """

    code: str
    message: str
    given_up: bool
    suspects: tuple[SequenceId, ...] = ()
    from_outside: bool = False


EngineNews = Outputs | Status | EngineUp | EngineDown


class EngineClient(Protocol):
    """One engine, in this process or in another."""

    def submit(self, submit: Submit) -> None:
        """Hands over a stream's sequences; what becomes of them comes with the outputs."""

    def cancel(self, cancel: Cancel) -> None:
        """Ends sequences; unknown ones are ignored."""

    def outputs(self) -> AsyncIterator[EngineNews]:
        """News in order, until the client is closed. One reader.

        It raises what the client itself failed of: nobody watches over the engine any more.
        """

    async def close(self) -> None:
        """Ends the engine; what still runs is dropped."""


class News:
    """The queue behind `outputs()`; filled on the event loop's thread."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[EngineNews | None] = asyncio.Queue()
        self._failure: BaseException | None = None

    def put(self, news: EngineNews) -> None:
        self._queue.put_nowait(news)

    def end(self, failure: BaseException | None = None) -> None:
        self._failure = failure
        self._queue.put_nowait(None)

    async def __aiter__(self) -> AsyncIterator[EngineNews]:
        while (news := await self._queue.get()) is not None:
            yield news
        if self._failure is not None:
            raise EngineGone("What watches over the engine failed.") from self._failure
