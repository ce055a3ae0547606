"""Defines the engine's interface for `generation`: submit, cancel, outputs, status, close."""

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
    """An engine has loaded. After a restart, the new engine has no sequences."""

    ready: Ready
    # The process id; None if the engine runs in this process.
    pid: int | None = None
    # The name of the engine's machine; empty for this machine.
    node: str = ""


class EngineResized(msgspec.Struct, frozen=True):
    """A client with several engines added or removed an engine; no sequence is affected."""

    ready: Ready
    # The process id of the first engine.
    pid: int | None = None
    # True if an engine was added.
    has_started: bool = False


class EngineDown(msgspec.Struct, frozen=True):
    """The engine has died and lost its state. The engine restarts unless `given_up` is true.

    `message` has the reason and the last lines of the engine's stderr. `suspects` are the sequences
    of the step in which the engine died. `from_outside` means that the engine was killed, or that
    the system could not start a process. Neither the suspects nor the model are to blame then.
    `lost` lists the lost sequences if another engine can take them over immediately. None means
    that all sequences of the engine are lost.
    """

    code: str
    message: str
    given_up: bool
    suspects: tuple[SequenceId, ...] = ()
    from_outside: bool = False
    lost: tuple[SequenceId, ...] | None = None


StateNews = Status | Loading | AdapterRead | EngineUp | EngineResized | EngineDown
"""News (messages) about the engine itself, and not about its sequences."""

EngineNews = Outputs | StateNews


class EngineClient(Protocol):
    """One engine, in this process or another. Its messages arrive in `news` until `close`."""

    news: "NewsQueue"

    def submit(self, submit: Submit) -> None:
        """Hand over a stream's sequences. Their outputs arrive in `news`."""

    def cancel(self, cancel: Cancel) -> None:
        """End sequences; ids of unknown sequences are ignored."""

    def adapt(self, message: LoadAdapter | DropAdapter) -> None:
        """Load or drop an adapter. After a load, `news` contains an AdapterRead."""

    async def close(self) -> None:
        """End the engine and drop its running sequences."""


def _drop(news: EngineNews) -> None:
    """Ignore messages that arrive after the end."""


class NewsQueue:
    """Passes the engine's messages to one reader in order. The event loop's thread adds them.

    The reader either iterates or registers callbacks with `subscribe`. Callbacks are called
    directly. If the engine's client failed, the iteration raises RuntimeError, because no code
    watches the engine any more.
    """

    def __init__(self) -> None:
        self._queue: asyncio.Queue[EngineNews | None] = asyncio.Queue()
        self._failure: BaseException | None = None
        self.put: Callable[[EngineNews], None] = self._queue.put_nowait
        self.deliver: Callable[[Outputs], None] = self._queue.put_nowait
        self.end: Callable[[BaseException | None], None] = self._end

    def subscribe(
        self,
        deliver: Callable[[Outputs], None],
        hear: Callable[[StateNews], None],
        on_end: Callable[[BaseException | None], None],
    ) -> None:
        """Call `deliver` with outputs, `hear` with other messages, and `on_end` at the end.

        An error in a callback ends the reader but not the engine: `put` passes the error to `end`,
        which calls `on_end` and drops all later messages. A client may also call `deliver`
        directly, which saves one call per step. The client must then pass errors to `end`.
        """

        def put(news: EngineNews) -> None:
            try:
                deliver(news) if isinstance(news, Outputs) else hear(news)
            except STEERING:
                raise
            # A panic in a native library is not an Exception.
            except BaseException as error:
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
