"""Who reads a stream: what they were given, when nobody is left, why they must leave for now."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, TypeVar

from headrace.streams.events import AnyEvent, Tokens, is_terminal
from headrace.streams.log import Log, follow
from headrace_common.errors import RequestError
from headrace_common.system.awake import Countdown
from headrace_common.system.race import race

Result = TypeVar("Result")


class Reader:
    """One reader of a stream: iterate it, and say what has reached the client."""

    def __init__(self, audience: "Audience", log: Log, after: int) -> None:
        self._audience = audience
        self._events = follow(log, after)

    def __aiter__(self) -> AsyncIterator[AnyEvent]:
        return self._events

    def sent(self, event: AnyEvent) -> None:
        """The client has been given this event and all before it."""
        if isinstance(event, Tokens):
            self._audience.has_seen_tokens = True
        elif is_terminal(event):
            self._audience.is_served = True


class ReaderPause:
    """Set while no reader can be served; the stream itself goes on, now or after a restart."""

    def __init__(self) -> None:
        self._is_set = asyncio.Event()
        self._reason: RequestError | None = None

    def set(self, reason: RequestError) -> None:
        self._reason = reason
        self._is_set.set()

    def clear(self) -> None:
        self._reason = None
        self._is_set.clear()

    async def unless(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of `work`; raises the reason as soon as there is one."""
        async with race(work, self._is_set.wait()) as (working, _):
            if not working.done() and self._reason is not None:
                raise self._reason.with_traceback(None)  # raised often: it would grow
            result: Result = await working
            return result


class Audience:
    """The readers of one stream.

    When the last one leaves, the stream is abandoned at once if somebody has seen tokens of it,
    or its whole answer. Otherwise it lingers for `linger_s` first: a client that timed out and
    asks again finds its work done. With `linger_s` None the stream opted in, or has ended, and
    does not depend on readers.
    """

    def __init__(
        self,
        log: Log,
        linger_s: float | None = None,
        on_abandoned: Callable[[], None] = lambda: None,
        pause: ReaderPause | None = None,
    ) -> None:
        self.pause = pause or ReaderPause()
        self.has_seen_tokens = False
        self.is_served = False
        self.abandoned = asyncio.Event()
        self.num_readers = 0  # now
        self.num_joined = 0  # so far
        self.num_resumed = 0  # of those, who came when all others had left
        self._log = log
        self._linger_s = linger_s
        self._on_abandoned = on_abandoned
        self._linger: Countdown | None = None

    @property
    def is_lingering(self) -> bool:
        """Whether nobody reads, and a client that asks the same may still take over."""
        return self._linger is not None

    @contextlib.asynccontextmanager
    async def reader(self, after: int = -1) -> AsyncIterator[Reader]:
        """All events after the cursor. Leaving the context is leaving the stream."""
        self.num_resumed += bool(self.num_joined and not self.num_readers)
        self.num_readers += 1
        self.num_joined += 1
        self._stop_lingering()
        try:
            yield Reader(self, self._log, after)
        finally:
            self.num_readers -= 1
            if self.num_readers == 0 and self._linger_s is not None:
                self._linger_for(self._linger_s)

    def close(self) -> None:
        """Stops waiting for readers."""
        self._stop_lingering()
        self.abandoned.set()

    def _stop_lingering(self) -> None:
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None

    def _linger_for(self, linger_s: float) -> None:
        if self.is_served or self.has_seen_tokens or linger_s == 0:
            self._give_up()
        else:
            self._linger = Countdown(linger_s, self._give_up)

    def _give_up(self) -> None:
        self._linger = None
        self.abandoned.set()
        self._on_abandoned()
