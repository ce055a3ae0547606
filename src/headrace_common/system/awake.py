"""Limits on waiting that count only the time while this process runs.

A process that is stopped (by SIGSTOP, or with its container) receives nothing. Silence during a
stop therefore proves nothing. The clocks continue during a stop, so limits are counted in ticks.
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

NUM_TICKS = 8  # ticks per limit
# A tick that is later than this many seconds means that the process was stopped.
STOPPED_S = 5.0
_LATE_S = 0.5
_TICK_S = 1.0


class Countdown:
    """Calls back after `seconds` during which the event loop was running.

    A late tick does not count. The process was stopped or the loop was blocked, and messages from
    this time are still unread.
    """

    def __init__(self, seconds: float, callback: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._tick_s = seconds / NUM_TICKS
        self._callback = callback
        self._num_left = NUM_TICKS
        self._start_tick()

    def cancel(self) -> None:
        self._timer.cancel()

    def _start_tick(self) -> None:
        late_at = self._loop.time() + 1.5 * self._tick_s + _LATE_S
        self._timer = self._loop.call_later(self._tick_s, self._tick, late_at)

    def _tick(self, late_at: float) -> None:
        self._num_left -= self._loop.time() < late_at
        if self._num_left:
            self._start_tick()
        else:
            self._callback()


@contextlib.asynccontextmanager
async def within(seconds: float) -> AsyncIterator[asyncio.Timeout]:
    """Like `asyncio.timeout`, with a Countdown. Raises TimeoutError if the body takes longer."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as limit:
        countdown = Countdown(seconds, lambda: limit.reschedule(loop.time()))
        try:
            yield limit
        finally:
            countdown.cancel()


async def is_done_within(task: "asyncio.Future[Any]", seconds: float) -> bool:
    """Wait up to `seconds`, and return whether the task is done.

    The task continues in either case.
    """
    with contextlib.suppress(TimeoutError):
        async with within(seconds):
            await asyncio.wait([task])
    return task.done()


class ProcessStops:
    """Detects that this process was stopped. A thread ticks while the context is open."""

    def __init__(self) -> None:
        self._was_stopped = False
        self._ticked_at = time.monotonic()
        self._has_left = threading.Event()

    def __enter__(self) -> "ProcessStops":
        self._ticked_at = time.monotonic()
        threading.Thread(target=self._run, name="stops", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_left.set()

    def take(self) -> bool:
        """Return whether the process was stopped since the last call."""
        self._tick()
        was_stopped, self._was_stopped = self._was_stopped, False
        return was_stopped

    def _run(self) -> None:
        while not self._has_left.wait(_TICK_S):
            self._tick()

    def _tick(self) -> None:
        now = time.monotonic()
        if now - self._ticked_at > _TICK_S + STOPPED_S:
            self._was_stopped = True
        self._ticked_at = now
