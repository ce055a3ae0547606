"""Who reads a stream, what they were given, and when it counts as abandoned."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

from headrace.streams.events import AnyEvent, Tokens, is_terminal
from headrace.streams.log import Log, follow


class Reader:
    """One who follows a stream: iterate it, and say what has reached the client."""

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


class Audience:
    """The readers of one stream.

    When the last one leaves, a stream whose answer was delivered, or of whose tokens somebody
    saw some, is abandoned at once. Another one lingers for `linger_s` first, so that a client
    that timed out and asks again finds its work done. With `linger_s` None the stream opted in:
    it does not depend on readers.
    """

    def __init__(self, linger_s: float | None, on_abandoned: Callable[[], None]) -> None:
        self.has_seen_tokens = False
        self.is_served = False
        self.abandoned = asyncio.Event()
        self._linger_s = linger_s
        self._on_abandoned = on_abandoned
        self._num_readers = 0
        self._linger: asyncio.TimerHandle | None = None

    @property
    def is_lingering(self) -> bool:
        """Nobody reads, and whoever asks the same may still take over."""
        return self._linger is not None

    @contextlib.asynccontextmanager
    async def reader(self, log: Log, after: int) -> AsyncIterator[Reader]:
        """A reader's stay."""
        self._num_readers += 1
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None
        try:
            yield Reader(self, log, after)
        finally:
            self._num_readers -= 1
            if self._num_readers == 0 and self._linger_s is not None:
                self._left_alone(self._linger_s)

    def close(self) -> None:
        """Waits for nobody any more."""
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None
        self.abandoned.set()

    def _left_alone(self, linger_s: float) -> None:
        if self.is_served or self.has_seen_tokens or linger_s == 0:
            self._give_up()
        else:
            self._linger = asyncio.get_running_loop().call_later(linger_s, self._give_up)

    def _give_up(self) -> None:
        self._linger = None
        self.abandoned.set()
        self._on_abandoned()
