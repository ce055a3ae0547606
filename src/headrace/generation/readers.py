"""Tracks the readers of a stream: which events they received, and whether any reader is left."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from headrace.streams.events import AnyEvent, Error, Finish, Tokens
from headrace.streams.log import Log, follow
from headrace_common.errors import RequestError
from headrace_common.system.awake import Countdown
from headrace_common.system.race import race

Result = TypeVar("Result")


class Reader:
    """One reader of a stream.

    The caller iterates over the reader, and calls `sent` for each event that reached the client.
    """

    def __init__(self, audience: "Audience", log: Log, after: int) -> None:
        self._audience = audience
        self._events = follow(log, after)

    def __aiter__(self) -> AsyncIterator[AnyEvent]:
        return self._events

    def sent(self, event: AnyEvent) -> None:
        """Record that the client has received this event and all earlier events."""
        if isinstance(event, Tokens):
            self._audience.has_seen_tokens = True
        elif isinstance(event, Finish | Error):
            self._audience.is_served = True


class ReaderPause:
    """Disconnects readers while at least one reason is set.

    The stream itself continues, either now or after a restart.
    """

    def __init__(self) -> None:
        self.is_set = asyncio.Event()
        self._reasons: list[RequestError] = []

    def set(self, reason: RequestError) -> None:
        self._reasons.append(reason)
        self.is_set.set()

    def clear(self, reason: RequestError) -> None:
        """Remove this reason; other reasons stay."""
        self._reasons = [it for it in self._reasons if it is not reason]
        if not self._reasons:
            self.is_set.clear()

    def check(self) -> None:
        """Raise the newest reason if a reason is set."""
        if self._reasons:
            # The same exception is raised often. Without the reset, its traceback would grow each
            # time.
            raise self._reasons[-1].with_traceback(None)

    async def unless(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Return the result of `work`. Raises the reason if a reason is set before `work` is
        done.
        """
        async with race(work, self.is_set.wait()) as (working, _):
            if not working.done():
                self.check()
            result: Result = await working
            return result


class Audience:
    """The readers of one stream.

    When the last reader leaves, the stream is abandoned immediately if the client has seen tokens
    or the whole answer. Otherwise the stream continues for `linger_s` seconds. Meanwhile, a client
    that timed out can retry and find the answer. The stream ends earlier if another request needs
    its place: `others_wait` returns whether other requests are waiting.

    `linger_s` is None if the stream must not depend on readers: the client opted in to resuming, or
    the stream has ended.
    """

    def __init__(
        self,
        log: Log,
        linger_s: float | None = None,
        on_abandoned: Callable[[], None] = lambda: None,
        pause: ReaderPause | None = None,
        others_wait: Callable[[], bool] = lambda: False,
    ) -> None:
        self.pause = pause or ReaderPause()
        self.has_seen_tokens = False
        self.is_served = False
        self.abandoned = asyncio.Event()
        # The current number of readers.
        self.num_readers = 0
        # The number of readers so far.
        self.num_joined = 0
        # The number of readers that joined after all earlier readers had left.
        self.num_resumed = 0
        self._log = log
        self._linger_s = linger_s
        self._on_abandoned = on_abandoned
        self._others_wait = others_wait
        self._linger: Countdown | None = None

    @property
    def is_lingering(self) -> bool:
        """Return whether the stream has no reader but waits for the client to retry."""
        return self._linger is not None

    @contextlib.asynccontextmanager
    async def reader(self, after: int = -1) -> AsyncIterator[Reader]:
        """Provide a reader of all events after the number `after`.

        The reader leaves when the context ends.
        """
        self.num_resumed += bool(self.num_joined and not self.num_readers)
        self.num_readers += 1
        self.num_joined += 1
        if self._linger is not None:
            self._stop_lingering()
        try:
            yield Reader(self, self._log, after)
        finally:
            self.num_readers -= 1
            if self.num_readers == 0 and self._linger_s is not None:
                # A client that has received the end of the stream will not retry.
                if self.is_served:
                    self.abandoned.set()
                else:
                    self._linger_for(self._linger_s)

    def close(self) -> None:
        """Stop waiting for readers."""
        self._stop_lingering()
        self.abandoned.set()

    def yield_place(self) -> None:
        """Abandon the stream if it has no reader and other requests wait."""
        if self._linger is not None and self._others_wait():
            self._stop_lingering()
            self._give_up()

    def _stop_lingering(self) -> None:
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None

    def _linger_for(self, linger_s: float) -> None:
        if self.has_seen_tokens or linger_s == 0 or self._others_wait():
            self._give_up()
        else:
            self._linger = Countdown(linger_s, self._give_up)

    def _give_up(self) -> None:
        self._linger = None
        self.abandoned.set()
        self._on_abandoned()
