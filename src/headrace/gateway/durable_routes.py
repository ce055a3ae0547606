"""Streams as Durable Streams 1.0 has them read: from an offset, at once, by long poll or as SSE.

The messages of a stream are the events of its log, the offset behind one is the number of the next.
"""

import asyncio
import base64
import contextlib
import itertools
import random
import re
import time
from typing import NamedTuple, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.gateway.auth import Auth
from headrace.gateway.delivery import unless_left, while_connected
from headrace.generation.generation import Generation
from headrace.generation.registry import Found
from headrace.protocols.dialect import PING, encode
from headrace.streams.events import AnyEvent
from headrace.streams.store import ById
from headrace.workers.loop_slices import slice_of_loop
from headrace_common.errors import RequestError
from headrace_common.ids import StreamId

LONG_POLL_S, SSE_S = 20.0, 60.0
_PAGE, _MAX_BYTES = 256, 1 << 20
_OFFSET = re.compile(r"[0-9]{16}")
_CURSOR = re.compile(r"[0-9]{1,15}")
_CURSOR_S, _CURSOR_EPOCH = 20, 1728432000  # the protocol's: 9 October 2024
_MAX_JITTER_S = 3600
_LINE = re.compile(rb"\r\n|\r|\n")
_SECURITY = {"Cross-Origin-Resource-Policy": "same-origin"}


class StreamMessages(Protocol):
    """The messages that the events of a stream stand for, in its media type."""

    media_type: str

    def of(self, event: AnyEvent) -> list[bytes]:
        """The messages of an event; an event without one takes an offset all the same."""


class EventMessages:
    """Events as JSON."""

    media_type = "application/json"

    def of(self, event: AnyEvent) -> list[bytes]:
        return [encode(event)]


class DurableRead(NamedTuple):
    """A request to read. `offset` is an event's number, -1 the start, None the tail."""

    offset: int | None
    live: str
    cursor: int

    @classmethod
    def read(cls, request: Request) -> "DurableRead":
        """RequestError `invalid_value` for what the protocol does not know."""
        given = request.query_params
        offsets, live = given.getlist("offset"), given.get("live", "")
        if live not in ("", "long-poll", "sse"):
            raise RequestError("invalid_value", "live is long-poll or sse.", "live")
        if live and not offsets:
            raise RequestError("invalid_value", f"live={live} needs an offset.", "offset")
        offset = offsets[0] if offsets else "-1"
        if len(offsets) > 1 or not (offset in ("-1", "now") or _OFFSET.fullmatch(offset)):
            known = "-1, now, or one that the server has sent: 16 digits"
            raise RequestError("invalid_value", f"One offset is taken: {known}.", "offset")
        cursor = given.get("cursor", "")
        return cls(
            None if offset == "now" else int(offset),
            live,
            int(cursor) if _CURSOR.fullmatch(cursor) else -1,
        )


class MessagePage(NamedTuple):
    """Messages between two offsets. `is_closed`: nothing will ever follow them."""

    messages: list[bytes]
    start: int
    end: int
    is_up_to_date: bool
    is_closed: bool

    def headers(self, cursor: str = "") -> dict[str, str]:
        known = {"Stream-Next-Offset": written(self.end)}
        if self.is_up_to_date:
            known["Stream-Up-To-Date"] = "true"
        if self.is_closed:
            known["Stream-Closed"] = "true"
        return known | ({"Stream-Cursor": cursor} if cursor else {})


class DurableRoutes:
    def __init__(self, generation: Generation, auth: Auth, heartbeat_s: float) -> None:
        self._streams = generation.streams
        self._auth = auth
        self._heartbeat_s = heartbeat_s

    async def read(self, request: Request) -> ASGIApp:
        """GET and HEAD of one stream."""
        asked = DurableRead.read(request)
        owner = self._auth.owner(request.headers)
        found = await self._streams.find(owner, ById(StreamId(request.path_params["id"])))
        if found is None:
            code = "stream_gone" if asked.offset not in (None, -1) else "stream_not_found"
            raise RequestError(code, "There is no such stream, or it has expired.")
        return await answer_read(request, asked, found, EventMessages(), self._heartbeat_s)


async def answer_read(
    request: Request, asked: DurableRead, found: Found, messages: StreamMessages, heartbeat_s: float
) -> ASGIApp:
    tail = found.log.next_seq
    if (asked.offset or 0) > tail:
        message = f"The offset is beyond {written(tail)}, the last one of this stream."
        raise RequestError("invalid_value", message, "offset")
    start = tail if asked.offset is None else max(0, asked.offset)
    reading = _Reading(found, messages)
    if request.method == "HEAD":
        return _head(await reading.page(tail), messages)
    if asked.live == "sse":
        return _LiveMessages(reading, start, asked.cursor, heartbeat_s)
    wait_s = LONG_POLL_S if asked.live else 0.0
    page = await unless_left(request.receive, reading.page(start, wait_s))
    cursor = _cursor(asked.cursor) if asked.live else ""
    if asked.live and page.start == page.end:
        return Response(status_code=204, headers=_SECURITY | page.headers(cursor))
    headers = _SECURITY | page.headers(cursor) | {"Cache-Control": "private, no-cache"}
    if asked.offset is None:
        headers["Cache-Control"] = "no-store"
    else:
        span = (found.record.id, written(page.start), written(page.end))
        headers["ETag"] = f'"{":".join(span)}{":closed" * page.is_closed}"'
        if not asked.live and request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
    headers["Content-Type"] = messages.media_type  # as it is: Starlette would name a charset
    return Response(reading.body(page), headers=headers)


class _Reading:
    """One stream as messages."""

    def __init__(self, found: Found, messages: StreamMessages) -> None:
        self.found = found
        self.messages = messages
        kind = messages.media_type.partition(";")[0].strip()
        self._is_json = kind == "application/json"
        self.is_binary = not self._is_json and not kind.startswith("text/")

    async def page(self, start: int, wait_s: float = 0.0) -> MessagePage:
        """The messages behind an offset that fit into a page; waits a while for the first."""
        log = self.found.log
        if wait_s:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self.found.audience.pause.unless(log.wait(start - 1))
        taken: list[bytes] = []
        size, end, has_ended = 0, start, False
        while size < _MAX_BYTES:
            events, has_ended = await log.read(end - 1, _PAGE)
            for event in events:
                await slice_of_loop()
                said = self.messages.of(event)
                taken += said
                size += sum(map(len, said))
                end += 1
                if size >= _MAX_BYTES:
                    break
            if end >= log.next_seq or not events:
                break
        is_up_to_date = end >= log.next_seq
        return MessagePage(taken, start, end, is_up_to_date, has_ended and is_up_to_date)

    def body(self, page: MessagePage) -> bytes:
        if self._is_json:
            return b"[" + b",".join(page.messages) + b"]"
        return b"".join(page.messages)

    def frames(self, page: MessagePage, cursor: int) -> bytes:
        """A page as SSE: its messages, and where one stands behind them."""
        frames = b""
        if page.messages:
            data = self.body(page)
            data = base64.b64encode(data) if self.is_binary else data
            frames = b"event: data\n" + b"".join(map(_data_line, _LINE.split(data))) + b"\n"
        control: dict[str, object] = {"streamNextOffset": written(page.end)}
        if page.is_closed:
            control["streamClosed"] = True
        else:
            control["streamCursor"] = _cursor(cursor)
        if page.is_up_to_date:
            control["upToDate"] = True
        return frames + b"event: control\ndata:%b\n\n" % encode(control)


class _LiveMessages:
    """Messages as they come, for about a minute; then the client asks again where it stands."""

    def __init__(self, reading: _Reading, start: int, cursor: int, heartbeat_s: float) -> None:
        self._reading = reading
        self._next = start
        self._cursor = cursor
        self._heartbeat_s = heartbeat_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {
            "content-type": "text/event-stream",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
            "x-stream-id": self._reading.found.record.id,
        } | {name.lower(): value for name, value in _SECURITY.items()}
        if self._reading.is_binary:
            headers["stream-sse-data-encoding"] = "base64"
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SSE_S * random.uniform(0.8, 1.0)):
                await while_connected(receive, self._deliver(send))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _deliver(self, send: Send) -> None:
        """A cut shows a client that it has to ask again: errors are told in that answer."""
        async with self._reading.found.audience.reader(self._next - 1):
            with contextlib.suppress(RequestError):
                await self._follow(send)

    async def _follow(self, send: Send) -> None:
        for turn in itertools.count():
            page = await self._reading.page(self._next, self._heartbeat_s if turn else 0.0)
            is_news = page.end > self._next or page.is_closed or not turn
            frames = self._reading.frames(page, self._cursor) if is_news else PING
            await send({"type": "http.response.body", "body": frames, "more_body": True})
            self._next = page.end
            if page.is_closed:
                return


def _data_line(line: bytes) -> bytes:
    """A line of SSE; readers take one space off."""
    return b"data:%b%b\n" % (b" " * line.startswith(b" "), line)


def _head(page: MessagePage, messages: StreamMessages) -> Response:
    kind = {"Cache-Control": "no-store", "Content-Type": messages.media_type}
    return Response(headers=_SECURITY | page.headers() | kind)


def written(offset: int) -> str:
    """Offsets sort as texts do."""
    return f"{offset:016d}"


def _cursor(given: int) -> str:
    """The number of the interval; beyond the client's own, or caches would repeat themselves."""
    current = int(time.time() - _CURSOR_EPOCH) // _CURSOR_S
    if given < current:
        return str(current)
    return str(given + max(1, random.randint(1, _MAX_JITTER_S) // _CURSOR_S))
