"""Polls a state, and sends server-sent events for each change of the state."""

import asyncio
from collections.abc import Callable
from typing import Generic, TypeVar

from starlette.types import Receive, Scope, Send

from headrace.gateway.delivery import while_connected
from headrace.gateway.http_responses import live_start

Seen = TypeVar("Seen")


class Watch(Generic[Seen]):
    """Sends the first state, then each change. A slow reader gets only the newest state.

    `frames` takes two states: the last state that was sent (at first None), and the current
    state. The result has the events for the change; if the result is empty, nothing is sent.
    `heartbeat` is sent while the state does not change.
    """

    def __init__(
        self,
        read: Callable[[], Seen],
        frames: Callable[[Seen | None, Seen], bytes],
        heartbeat: bytes,
        interval_s: float = 0.25,
        heartbeat_s: float = 10.0,
    ) -> None:
        self._read = read
        self._frames = frames
        self._heartbeat = heartbeat
        self._interval_s = interval_s
        self._heartbeat_s = heartbeat_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send(live_start({"content-type": "text/event-stream"}))
        await while_connected(receive, self._show(send))

    async def _show(self, send: Send) -> None:
        clock = asyncio.get_running_loop().time
        before: Seen | None = None
        sent_at = clock()
        while True:
            now = self._read()
            frames = self._frames(before, now)
            if not frames and clock() >= sent_at + self._heartbeat_s:
                frames = self._heartbeat
            if frames:
                sent_at, before = clock(), now
                await send({"type": "http.response.body", "body": frames, "more_body": True})
            await asyncio.sleep(self._interval_s)
