"""Serves streams with the Durable Streams 1.0 protocol, as pages, by long poll or as SSE.

The messages of a stream are the events of the stream's log. The offset after an event is the seq
of the next event.
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
from headrace.gateway.http_responses import live_start
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
# The protocol counts intervals of 20 s. The first interval began on 9 October 2024.
_CURSOR_S, _CURSOR_EPOCH = 20, 1728432000
_MAX_JITTER_S = 3600
_LINE = re.compile(rb"\r\n|\r|\n")
_SECURITY = {"Cross-Origin-Resource-Policy": "same-origin"}


class StreamMessages(Protocol):
    """Converts the events of a stream to messages of one media type."""

    media_type: str

    def of(self, event: AnyEvent) -> list[bytes]:
        """Return the messages of an event. An event without messages still takes up an offset."""


class EventMessages:
    """Renders each event as one JSON message."""

    media_type = "application/json"

    def of(self, event: AnyEvent) -> list[bytes]:
        return [encode(event)]


class DurableRead(NamedTuple):
    """Holds the parameters of a read.

    `offset` is the seq of the first event to read; -1 means the start of the stream, and None the
    end.
    """

    offset: int | None
    live: str
    cursor: int

    @classmethod
    def read(cls, request: Request) -> "DurableRead":
        """Parse the query; raise RequestError `invalid_value` for a value that is not allowed."""
        given = request.query_params
        offsets, live = given.getlist("offset"), given.get("live", "")
        if live not in ("", "long-poll", "sse"):
            raise RequestError("invalid_value", "live must be long-poll or sse.", "live")
        if live and not offsets:
            raise RequestError("invalid_value", f"live={live} needs an offset.", "offset")
        offset = offsets[0] if offsets else "-1"
        if len(offsets) > 1 or not (offset in ("-1", "now") or _OFFSET.fullmatch(offset)):
            known = "-1, now, or 16 digits that the server has sent"
            raise RequestError("invalid_value", f"Send one offset: {known}.", "offset")
        cursor = given.get("cursor", "")
        return cls(
            None if offset == "now" else int(offset),
            live,
            int(cursor) if _CURSOR.fullmatch(cursor) else -1,
        )


class MessagePage(NamedTuple):
    """Holds the messages between two offsets. If `is_closed`, the stream has no later messages."""

    messages: list[bytes]
    start: int
    end: int
    is_up_to_date: bool
    is_closed: bool

    def headers(self, cursor: str = "") -> dict[str, str]:
        known = {"Stream-Next-Offset": write_offset(self.end)}
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
        """Answer a GET or HEAD request for one stream."""
        query = DurableRead.read(request)
        owner = self._auth.owner(request.headers)
        found = await self._streams.find(owner, ById(StreamId(request.path_params["id"])))
        if found is None:
            code = "stream_gone" if query.offset not in (None, -1) else "stream_not_found"
            raise RequestError(code, "This stream does not exist, or it has expired.")
        await self._streams.reach(found, (query.offset or 0) - 1)
        return await answer_read(request, query, found, EventMessages(), self._heartbeat_s)


async def answer_read(
    request: Request, query: DurableRead, found: Found, messages: StreamMessages, heartbeat_s: float
) -> ASGIApp:
    """Answer a read with one page, a long poll or SSE; for HEAD, with headers only.

    A page from an offset has an ETag, so that caches can validate the page. A page from the end
    has no ETag. Raise RequestError if the offset is beyond the end.
    """
    tail = found.log.next_seq
    if (query.offset or 0) > tail:
        message = f"The offset is beyond the end of this stream, which is at {write_offset(tail)}."
        raise RequestError("invalid_value", message, "offset")
    start = tail if query.offset is None else max(0, query.offset)
    reading = _Reading(found, messages)
    if request.method == "HEAD":
        return _head(await reading.page(tail), messages)
    if query.live == "sse":
        return _LiveMessages(reading, start, query.cursor, heartbeat_s)
    wait_s = LONG_POLL_S if query.live else 0.0
    page = await unless_left(request.receive, reading.page(start, wait_s))
    cursor = _cursor(query.cursor) if query.live else ""
    if query.live and page.start == page.end:
        return Response(status_code=204, headers=_SECURITY | page.headers(cursor))
    headers = _SECURITY | page.headers(cursor) | {"Cache-Control": "private, no-cache"}
    if query.offset is None:
        headers["Cache-Control"] = "no-store"
    else:
        span = (found.record.id, write_offset(page.start), write_offset(page.end))
        headers["ETag"] = f'"{":".join(span)}{":closed" * page.is_closed}"'
        if not query.live and request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
    # The header is set here, because Starlette would add a charset to a media type.
    headers["Content-Type"] = messages.media_type
    return Response(reading.body(page), headers=headers)


class _Reading:
    """Reads one stream as messages."""

    def __init__(self, found: Found, messages: StreamMessages) -> None:
        self.found = found
        self.messages = messages
        kind = messages.media_type.partition(";")[0].strip()
        self._is_json = kind == "application/json"
        self.is_binary = not self._is_json and not kind.startswith("text/")

    async def page(self, start: int, wait_s: float = 0.0) -> MessagePage:
        """Return the messages after an offset, as many as fit into a page.

        If there are no messages yet, wait up to `wait_s` seconds for the first message.
        """
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
                messages = self.messages.of(event)
                taken += messages
                size += sum(map(len, messages))
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
        """Render a page as SSE: the messages, then a control event with the next offset."""
        frames = b""
        if page.messages:
            data = self.body(page)
            data = base64.b64encode(data) if self.is_binary else data
            frames = b"event: data\n" + b"".join(map(_data_line, _LINE.split(data))) + b"\n"
        control: dict[str, object] = {"streamNextOffset": write_offset(page.end)}
        if page.is_closed:
            control["streamClosed"] = True
        else:
            control["streamCursor"] = _cursor(cursor)
        if page.is_up_to_date:
            control["upToDate"] = True
        return frames + b"event: control\ndata:%b\n\n" % encode(control)


class _LiveMessages:
    """Sends messages for about a minute, as soon as each message is written.

    The client then sends a new request from the offset that it has reached.
    """

    def __init__(self, reading: _Reading, start: int, cursor: int, heartbeat_s: float) -> None:
        self._reading = reading
        self._next = start
        self._cursor = cursor
        self._heartbeat_s = heartbeat_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {
            "content-type": "text/event-stream",
            "x-stream-id": self._reading.found.record.id,
            **_SECURITY,
        }
        if self._reading.is_binary:
            headers["stream-sse-data-encoding"] = "base64"
        await send(live_start(headers))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SSE_S * random.uniform(0.8, 1.0)):
                await while_connected(receive, self._deliver(send))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _deliver(self, send: Send) -> None:
        """Send messages until the stream ends. An error ends the answer early and silently.

        The client then sends a new request, and the answer to the new request reports the error.
        """
        async with self._reading.found.audience.reader(self._next - 1):
            with contextlib.suppress(RequestError):
                await self._follow(send)

    async def _follow(self, send: Send) -> None:
        for num_pages in itertools.count():
            page = await self._reading.page(self._next, self._heartbeat_s if num_pages else 0.0)
            is_news = page.end > self._next or page.is_closed or not num_pages
            frames = self._reading.frames(page, self._cursor) if is_news else PING
            await send({"type": "http.response.body", "body": frames, "more_body": True})
            self._next = page.end
            if page.is_closed:
                return


def _data_line(line: bytes) -> bytes:
    """Return one line of SSE data.

    Clients remove one leading space, so a line that starts with a space gets a second space.
    """
    return b"data:%b%b\n" % (b" " * line.startswith(b" "), line)


def _head(page: MessagePage, messages: StreamMessages) -> Response:
    kind = {"Cache-Control": "no-store", "Content-Type": messages.media_type}
    return Response(headers=_SECURITY | page.headers() | kind)


def write_offset(offset: int) -> str:
    """Write an offset with leading zeros, so that offsets can be sorted as strings."""
    return f"{offset:016d}"


def _cursor(given: int) -> str:
    """Return a cursor: the number of the current interval, or a number above the client's cursor.

    The result is always greater than `given`, because a cache would answer a repeated cursor with
    an old page.
    """
    current = int(time.time() - _CURSOR_EPOCH) // _CURSOR_S
    if given < current:
        return str(current)
    return str(given + max(1, random.randint(1, _MAX_JITTER_S) // _CURSOR_S))
