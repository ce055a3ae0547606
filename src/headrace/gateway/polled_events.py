"""Polls a state, and sends server-sent events for each change of the state."""

import asyncio
import math
from collections.abc import Callable
from typing import Generic, TypeVar

from starlette.types import Receive, Scope, Send

from headrace.gateway.delivery import while_connected
from headrace.gateway.http_responses import live_start

Seen = TypeVar("Seen")


class PolledState(Generic[Seen]):
    """A state that all watchers of a route share.

    However many clients watch, the state is read at most once per interval, and the events for a
    change are rendered once.

    `render` takes two states: the last state that was sent (at first None), and the current
    state. The result has the events for the change; if the result is empty, nothing is sent.
    """

    def __init__(
        self,
        read: Callable[[], Seen],
        render: Callable[[Seen | None, Seen], bytes],
        interval_s: float = 0.25,
    ) -> None:
        self.interval_s = interval_s
        self._read = read
        self._render = render
        self._newest: Seen | None = None
        # Time at which the state must be read again.
        self._stale_at = -math.inf
        # The events that lead to the newest state, by the `id()` of the earlier state. The entry
        # contains this state, so that no other state can get the same `id()`.
        self._rendered: dict[int, tuple[Seen | None, bytes]] = {}

    def newest(self) -> Seen:
        """Return the current state. Equal states are the same object."""
        now = asyncio.get_running_loop().time()
        if now >= self._stale_at:
            found = self._read()
            self._stale_at = now + self.interval_s
            if self._newest is None or found != self._newest:
                self._newest = found
                self._rendered.clear()
        assert self._newest is not None
        return self._newest

    def events_since(self, before: Seen | None) -> bytes:
        """Return the events for the change from an earlier state to the newest state."""
        if id(before) not in self._rendered:
            assert self._newest is not None
            self._rendered[id(before)] = before, self._render(before, self._newest)
        return self._rendered[id(before)][1]


class Watch(Generic[Seen]):
    """Sends the first state, then each change. A slow reader gets only the newest state.

    `heartbeat` is sent while the state does not change.
    """

    def __init__(
        self, state: PolledState[Seen], heartbeat: bytes, heartbeat_s: float = 10.0
    ) -> None:
        self._state = state
        self._heartbeat = heartbeat
        self._heartbeat_s = heartbeat_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send(live_start({"content-type": "text/event-stream"}))
        await while_connected(receive, self._show(send))

    async def _show(self, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        before: Seen | None = None
        sent_at = clock()
        while True:
            now = self._state.newest()
            frames = self._state.events_since(before)
            if not frames and clock() >= sent_at + self._heartbeat_s:
                frames = self._heartbeat
            if frames:
                sent_at, before = clock(), now
                await send({"type": "http.response.body", "body": frames, "more_body": True})
            await asyncio.sleep(self._state.interval_s)
