"""Reads what the server has recorded of a stream, through every API that returns it."""

import asyncio
import time
from typing import Any
from urllib.parse import quote

import msgspec

from stress.frames import error_in, own_dropped
from stress.http import Call, Exchange, exchange
from stress.story import RETRYABLE
from stress.witness import Proxy
from tools.harness.sse import Frame, frames_of

_PATIENCE_S = 300.0


class Truth(msgspec.Struct, frozen=True):
    """A stream from its first event on. `body` is None if the stream has no conversation."""

    stream_id: str
    state: dict[str, Any]
    events: list[dict[str, Any]]
    wire: list[Frame]
    body: bytes | None

    @property
    def code(self) -> str:
        """The code of the error that ended the stream, or ""."""
        last = self.events[-1]
        return str(last["code"]) if last["kind"] == "error" else ""


class NoTruth(Exception):
    """Raised if the server does not know the stream or refuses to return it."""


async def read_truth(proxy: Proxy, stream_id: str, conversation: str | None) -> Truth:
    """Reads a stream. Repeats each request while the server is unavailable.

    Raises NoTruth if the server refuses a request or stays unavailable.
    """
    base = f"/v1/streams/{stream_id}"
    state = msgspec.json.decode((await _get(proxy, base)).got.body)
    events: list[dict[str, Any]] = []
    is_done = False
    while not is_done:
        page = await _page(proxy, f"{base}/events?wait=30&after=", events)
        events += page["events"]
        is_done = page["done"]
    wire = await _stream(proxy, f"{base}/events?view=wire")
    body = None
    if conversation is not None:
        path = f"/v1/stream?from=0&conv_id={quote(conversation, safe='')}"
        newest = await _stream(proxy, path)
        body = bytes(newest.got.body) if newest.got.stream_id == stream_id else None
    if state["state"] not in ("finished", "failed", "cancelled"):
        state = msgspec.json.decode((await _get(proxy, base)).got.body)
    frames = own_dropped(frames_of(bytes(wire.got.body)))
    return Truth(stream_id, state, events, frames, body)


async def _page(proxy: Proxy, path: str, events: list[dict[str, Any]]) -> dict[str, Any]:
    after = str(events[-1]["seq"]) if events else ""
    made = await _get(proxy, path + after, (("Accept", "application/json"),))
    page: dict[str, Any] = msgspec.json.decode(made.got.body)
    return page


async def _stream(proxy: Proxy, path: str) -> Exchange:
    """Read a stream to its end.

    A server that cannot store events ends the body of an answer early, without an error.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        made = await _get(proxy, path)
        frames = own_dropped(frames_of(bytes(made.got.body)))
        if frames and (frames[-1].is_done or error_in(frames[-1:])):
            return made
        await asyncio.sleep(0.2)
    raise NoTruth(f"{path}: no end in {_PATIENCE_S:g} s")


async def _get(proxy: Proxy, path: str, headers: tuple[tuple[str, str], ...] = ()) -> Exchange:
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        made = await exchange(proxy, Call("GET", path, headers=headers))
        if made.got.is_whole and made.got.status == 200:
            return made
        if made.got.status not in (200, *RETRYABLE):
            raise NoTruth(f"{path}: {made.got.status} {bytes(made.got.body[:200])!r}")
        await asyncio.sleep(0.2)
    raise NoTruth(f"{path}: no answer in {_PATIENCE_S:g} s")
