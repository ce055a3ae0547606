"""Headrace's own routes for streams: show the state, send events after a cursor, cancel, delete."""

import asyncio
import contextlib
import re
from typing import Any, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.gateway.auth import Auth
from headrace.gateway.body_index import BodyIndex
from headrace.gateway.delivery import (
    LiveAnswer,
    Pace,
    pace_of,
    unless_left,
    while_connected,
)
from headrace.gateway.http_responses import answer
from headrace.generation.generation import Generation
from headrace.generation.registry import Found, Registry
from headrace.intake.answers import AnswerBody
from headrace.intake.conversations import Conversations
from headrace.protocols.dialect import WireFrames, encode
from headrace.protocols.framing import SSE
from headrace.protocols.openai.chunks import error_of
from headrace.streams.events import AnyEvent, Error, Finish
from headrace.streams.log import follow
from headrace.streams.store import ById
from headrace.workers.loop_slices import slice_of_loop
from headrace_common.config.settings import ServerConfig
from headrace_common.errors import RequestError
from headrace_common.ids import StreamId

_MAX_EVENTS, _MAX_WAIT_S = 1000, 30.0
_MAX_PAGE_BYTES = 1 << 20
_COUNT, _SECONDS = re.compile(r"[0-9]{1,4}"), re.compile(r"[0-9]{1,2}(\.[0-9]{0,9})?")


_CURSOR = re.compile(r"(?:(?P<id>[^:]+):)?(?P<seq>[0-9]{1,15})(?:\.(?P<part>[0-9]{1,6}))?")


class Cursor(NamedTuple):
    """A cursor after frame `part` of event `seq`.

    Without a part, the cursor is after all frames of the event.
    """

    seq: int
    part: int | None = None

    @property
    def after(self) -> int:
        """Returns the seq of the last event whose frames are all before the cursor."""
        return self.seq if self.part is None else self.seq - 1


START = Cursor(-1)


async def read_cursor(text: str | None, found: Found, streams: Registry) -> Cursor:
    """Read a cursor, and wait for its event if another server knew the event first.

    Raise RequestError `invalid_cursor` if the cursor is malformed, belongs to another stream or
    is beyond the log.
    """
    if not text:
        return START
    parts = _CURSOR.fullmatch(text)
    if parts is None:
        raise _invalid("A cursor is <stream id>:<seq> or <seq>, as in the id of an event.")
    if parts["id"] not in (None, found.record.id):
        raise _invalid("The cursor belongs to another stream.")
    seq = int(parts["seq"])
    if seq >= (next_seq := await streams.reach(found, seq)):
        raise _invalid(
            f"The cursor is beyond the last event of the stream, which is event {next_seq - 1}."
        )
    return Cursor(seq, int(parts["part"]) if parts["part"] else None)


def normalized(cursor: Cursor, num_frames: int) -> Cursor:
    """Drop the cursor's part number if it is the number of the event's last frame.

    Raise RequestError `invalid_cursor` if the event has no frame with this number.
    """
    seq, part = cursor
    if part is None:
        return cursor
    if part >= num_frames:
        raise _invalid(
            f"Event {seq} has {num_frames} parts, numbered from 0; it has no part {part}."
        )
    return Cursor(seq) if part == num_frames - 1 else cursor


def _invalid(message: str) -> RequestError:
    return RequestError("invalid_cursor", message, "after")


class NativeRoutes:
    def __init__(
        self,
        generation: Generation,
        conversations: Conversations,
        config: ServerConfig,
        auth: Auth,
        index: BodyIndex,
    ) -> None:
        self._streams = generation.streams
        self._conversations = conversations
        self._index = index
        self._config = config.streams
        self._auth = auth

    async def state(self, request: Request) -> ASGIApp:
        return answer(await self._shown(request, await self._find(request)))

    async def cancel(self, request: Request) -> ASGIApp:
        found = await self._find(request, suspended=True)
        await self._streams.stop(found)
        return answer(await self._shown(request, found))

    async def delete(self, request: Request) -> ASGIApp:
        owner = self._auth.owner(request.headers)
        await self._conversations.discard(owner, ById(StreamId(request.path_params["id"])))
        return Response(status_code=204)

    async def events(self, request: Request) -> ASGIApp:
        found = await self._find(request)
        text = request.headers.get("last-event-id") or request.query_params.get("after")
        cursor = await read_cursor(text, found, self._streams)
        if cursor.part is not None:
            counting = self._index.num_frames(found, cursor.seq)
            cursor = normalized(cursor, await unless_left(request.receive, counting))
        if "application/json" in request.headers.get("accept", ""):
            return _Page(found, cursor, request)
        is_wire = request.query_params.get("view") == "wire"
        if cursor != START and await _is_at_end(found, cursor):
            return Response(status_code=204)
        if is_wire:
            view = WireView(found, cursor)
            return LiveAnswer(found, view, pace_of(found.record, self._config))
        return LiveAnswer(found, EventView(found), Pace(self._config.heartbeat_s), cursor.after)

    async def _shown(self, request: Request, found: Found) -> dict[str, Any]:
        return await unless_left(request.receive, _state(found, self._index))

    async def _find(self, request: Request, suspended: bool = False) -> Found:
        owner, id = self._auth.owner(request.headers), StreamId(request.path_params["id"])
        found = await self._streams.find(owner, ById(id), suspended)
        if found is None:
            raise RequestError("stream_not_found", "This stream does not exist, or it has expired.")
        return found


class EventView:
    """Renders the events of the log, without a dialect, as server-sent events."""

    media_type = SSE.MEDIA_TYPE

    def __init__(self, found: Found) -> None:
        self._found = found

    def render(self, event: AnyEvent) -> list[bytes]:
        kind = type(event).__name__.lower()
        head = f"id: {self._found.record.id}:{event.seq}\nevent: {kind}\ndata: "
        return [head.encode() + encode(event) + b"\n\n"]

    def idle(self, form: str) -> bytes:
        beat = encode({"kind": "heartbeat", "state": self._found.state, "form": form})
        return b"event: heartbeat\ndata: " + beat + b"\n\n"

    def failure(self, error: RequestError) -> bytes:
        body = {"code": error.code, "type": error.kind.type, "message": error.message}
        return b"event: notice\ndata: " + encode(body) + b"\n\n"


class WireView(WireFrames):
    """Renders the frames of the POST's answer that follow a cursor."""

    def __init__(self, found: Found, cursor: Cursor) -> None:
        super().__init__(found.record, with_ids=True)
        self._cursor = cursor

    def render(self, event: AnyEvent) -> list[bytes]:
        frames = super().render(event)
        seq, part = self._cursor
        if event.seq > seq:
            return frames
        return frames[part + 1 :] if event.seq == seq and part is not None else []


class _Page:
    """Sends a page of events as one JSON object. If there are no events yet, waits a while."""

    def __init__(self, found: Found, cursor: Cursor, request: Request) -> None:
        self._found = found
        self._after = cursor.after
        self._limit = int(_number(request, "limit", _COUNT, 1, _MAX_EVENTS) or _MAX_EVENTS)
        self._wait_s = _number(request, "wait", _SECONDS, 0, _MAX_WAIT_S) or 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def deliver() -> None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._wait_s):
                    await self._found.log.wait(self._after)
            page = encode(await self._page())
            await Response(page, media_type="application/json")(scope, receive, send)

        await while_connected(receive, deliver())

    async def _page(self) -> dict[str, Any]:
        """Return a page of at most `limit` events. The page's size limit can reduce this number."""
        events, is_done = await self._found.log.read(self._after, self._limit)
        shown: list[msgspec.Raw] = []
        size, last = 0, self._after
        for event in events:
            if size > _MAX_PAGE_BYTES:
                is_done = False
                break
            await slice_of_loop()
            shown.append(msgspec.Raw(encode(event)))
            size, last = size + len(shown[-1]), event.seq
        return {"events": shown, "next": f"{self._found.record.id}:{last}", "done": is_done}


def _number(
    request: Request, name: str, pattern: re.Pattern[str], least: float, most: float
) -> float | None:
    """Read a number from the query; return None if the query does not have the number."""
    text = request.query_params.get(name)
    if text is None:
        return None
    if not pattern.fullmatch(text) or not least <= float(text) <= most:
        raise RequestError(
            "invalid_value", f"{name} must be a number from {least:g} to {most:g}.", name
        )
    return float(text)


async def _is_at_end(found: Found, cursor: Cursor) -> bool:
    if cursor.part is not None:
        return False
    _, has_ended = await found.log.read(cursor.seq, 1)
    return has_ended and cursor.seq == found.log.next_seq - 1


async def _state(found: Found, index: BodyIndex) -> dict[str, Any]:
    """Return the state of a stream for the client.

    After the end of the stream, the state contains the whole answer.
    """
    record, log = found.record, found.log
    shown: dict[str, Any] = {
        "id": record.id,
        "object": "stream",
        "state": found.state,
        "mode": record.mode,
        "durable": record.is_durable,
        "last_seq": log.next_seq - 1,
        "total_bytes": await index.num_bytes(found),
        "created": record.created,
        "model": record.request.model,
    }
    last, _ = await log.read(log.next_seq - 2, 1)
    if not isinstance(last[0], Finish | Error):
        return shown
    shown["state"] = _outcome(last[0])
    if isinstance(last[0], Error):
        return shown | {"error": error_of(last[0])}
    whole = AnswerBody(record)
    async for event in follow(log):
        await slice_of_loop()
        whole.feed(event)
    return shown | {"response": msgspec.Raw(await whole.body())}


def _outcome(last: Finish | Error) -> str:
    if isinstance(last, Finish):
        return "finished"
    is_stop = last.type == "cancelled_error"
    return "cancelled" if is_stop else "failed"
