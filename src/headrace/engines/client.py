"""The engine as generation sees it: submit, cancel, outputs, status, close."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Protocol

import msgspec

from headrace_common.ids import SequenceId
from headrace_common.messages import (
    AdapterRead,
    Cancel,
    DropAdapter,
    LoadAdapter,
    Loading,
    Outputs,
    Ready,
    Status,
    Submit,
)
from headrace_common.system.panics import STEERING


class EngineUp(msgspec.Struct, frozen=True):
    """An engine has loaded: the first one, or after a restart one that knows no sequences."""

    ready: Ready
    pid: int | None = None  # if it runs in a process of its own
    node: str = ""  # the machine it runs on, if that may be another


class EngineResized(msgspec.Struct, frozen=True):
    """An engine that is several has become larger or smaller; what runs is not concerned."""

    ready: Ready
    pid: int | None = None  # of the first one
    has_started: bool = False  # one more has come up


class EngineDown(msgspec.Struct, frozen=True):
    """The engine has died and lost its state. It restarts unless it was `given_up`.

    `message` has the reason and its last words. `suspects` were in the step that it died in.
    `from_outside`: somebody killed it, or the system could not start a process, so neither the
    suspects nor the model are to blame. `lost` has the sequences that are gone, where another
    engine runs on and takes them again at once; None: all of them.
    """

    code: str
    message: str
    given_up: bool
    suspects: tuple[SequenceId, ...] = ()
    from_outside: bool = False
    lost: tuple[SequenceId, ...] | None = None


StateNews = Status | Loading | AdapterRead | EngineUp | EngineResized | EngineDown
"""News of the engine itself, not of its sequences."""

EngineNews = Outputs | StateNews


class EngineClient(Protocol):
    """One engine, in this process or in another; `news` of it come until it is closed."""

    news: "NewsQueue"

    def submit(self, submit: Submit) -> None:
        """Hands over a stream's sequences; their outputs come as news."""

    def cancel(self, cancel: Cancel) -> None:
        """Ends sequences; unknown ones are ignored."""

    def adapt(self, message: LoadAdapter | DropAdapter) -> None:
        """Loads or drops an adapter; AdapterRead comes as news of the former."""

    async def close(self) -> None:
        """Ends the engine and drops what still runs."""


def _drop(news: EngineNews) -> None:
    """Ignore news after the end."""


class NewsQueue:
    """News in order, for one reader; filled on the event loop's thread.

    The reader either iterates, or gives functions to `hand_to`, which are called without a queue.
    The iteration ends with RuntimeError if the client failed, since its engine is then unwatched.
    """

    def __init__(self) -> None:
        self._queue: asyncio.Queue[EngineNews | None] = asyncio.Queue()
        self._failure: BaseException | None = None
        self.put: Callable[[EngineNews], None] = self._queue.put_nowait
        self.deliver: Callable[[Outputs], None] = self._queue.put_nowait
        self.end: Callable[[BaseException | None], None] = self._end

    def hand_to(
        self,
        deliver: Callable[[Outputs], None],
        hear: Callable[[StateNews], None],
        on_end: Callable[[BaseException | None], None],
    ) -> None:
        """Calls `deliver` with outputs, `hear` with all other news, `on_end` at the end.

        An error that these functions raise ends the reader, not the engine: `put` passes the error
        to `end`, which hands it to `on_end` and drops all later news. A client may also call
        `deliver` itself, which saves a call for each step; it then passes errors to `end`.
        """

        def put(news: EngineNews) -> None:
            try:
                deliver(news) if isinstance(news, Outputs) else hear(news)
            except STEERING:
                raise
            except BaseException as error:  # a library's panic is not an Exception
                end(error)

        def end(failure: BaseException | None) -> None:
            self.put = self.deliver = _drop
            on_end(failure)

        self.put, self.deliver, self.end = put, deliver, end
        while not self._queue.empty():
            news = self._queue.get_nowait()
            self.put(news) if news is not None else end(self._failure)

    def _end(self, failure: BaseException | None) -> None:
        self._failure = failure
        self._queue.put_nowait(None)

    async def __aiter__(self) -> AsyncIterator[EngineNews]:
        while (news := await self._queue.get()) is not None:
            yield news
        if self._failure is not None:
            raise RuntimeError("The engine's supervisor failed") from self._failure
