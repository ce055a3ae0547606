"""Streams by event: state, events from a cursor, stop, forget."""

import asyncio
import contextlib
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from headrace.core.config import ServerConfig
from headrace.core.errors import RequestError
from headrace.core.ids import StreamId
from headrace.gateway.answers import answer
from headrace.gateway.cursor import START, Cursor, parse
from headrace.gateway.delivery import LiveAnswer, LiveFrames, Pace, pace_of, while_connected
from headrace.gateway.door import Door
from headrace.gateway.frames import decode, encode
from headrace.gateway.render import Answer
from headrace.gateway.wire_bytes import body_bytes
from headrace.generation.generation import Generation
from headrace.generation.registry import Found
from headrace.streams.events import AnyEvent, Error, Finish
from headrace.streams.log import follow
from headrace.streams.store import ById

_MAX_EVENTS, _MAX_WAIT_S = 1000, 30.0


class NativeRoutes:
    def __init__(self, generation: Generation, config: ServerConfig, door: Door) -> None:
        self._streams = generation.streams
        self._config = config.streams
        self._door = door

    async def state(self, request: Request) -> ASGIApp:
        return answer(await _state(await self._find(request)))

    async def cancel(self, request: Request) -> ASGIApp:
        found = await self._find(request)
        await self._streams.stop(found)
        return answer(await _state(found))

    async def delete(self, request: Request) -> ASGIApp:
        with contextlib.suppress(RequestError):
            await self._streams.forget(await self._find(request))
        return Response(status_code=204)

    async def events(self, request: Request) -> ASGIApp:
        found = await self._find(request)
        text = request.headers.get("last-event-id") or request.query_params.get("after")
        cursor = parse(text, found.record, found.log.next_seq)
        if "application/json" in request.headers.get("accept", ""):
            return _Page(found, cursor, request)
        is_wire = request.query_params.get("view") == "wire"
        if cursor != START and await _is_at_end(found, cursor):
            return Response(status_code=204)
        if is_wire:
            view = WireView(found, cursor)
            return LiveAnswer(found, view, pace_of(found.record, self._config))
        return LiveAnswer(found, EventView(found), Pace(self._config.heartbeat_s), cursor.seq)

    async def _find(self, request: Request) -> Found:
        owner = self._door.owner(request.headers)
        found = await self._streams.find(owner, ById(StreamId(request.path_params["id"])))
        if found is None:
            raise RequestError("stream_not_found", "There is no such stream, or it has expired.")
        return found


class EventView:
    """The log itself as server-sent events."""

    media_type = "text/event-stream"

    def __init__(self, found: Found) -> None:
        self._found = found

    def render(self, event: AnyEvent) -> list[bytes]:
        kind = type(event).__name__.lower()
        head = f"id: {self._found.record.id}:{event.seq}\nevent: {kind}\ndata: "
        return [head.encode() + encode(event) + b"\n\n"]

    def idle(self) -> bytes:
        beat = encode({"kind": "heartbeat", "state": self._found.state, "form": "data"})
        return b"event: heartbeat\ndata: " + beat + b"\n\n"

    def failure(self, error: RequestError) -> bytes:
        body = {"code": error.code, "type": error.kind.type, "message": error.message}
        return b"event: notice\ndata: " + encode(body) + b"\n\n"


class WireView(LiveFrames):
    """The frames of the POST, behind a cursor."""

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
    """Events as one JSON object; waits a while if there are none yet."""

    def __init__(self, found: Found, cursor: Cursor, request: Request) -> None:
        self._found = found
        self._after = cursor.seq
        self._limit = int(_number(request, "limit", _MAX_EVENTS, _MAX_EVENTS))
        self._wait_s = _number(request, "wait", 0.0, _MAX_WAIT_S)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def deliver() -> None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._wait_s):
                    await self._found.log.wait(self._after)
            events, is_done = await self._found.log.read(self._after, self._limit)
            last = events[-1].seq if events else self._after
            page = {"events": events, "next": f"{self._found.record.id}:{last}", "done": is_done}
            await Response(encode(page), media_type="application/json")(scope, receive, send)

        await while_connected(receive, deliver())


def _number(request: Request, name: str, default: float, largest: float) -> float:
    text = request.query_params.get(name)
    if text is None:
        return default
    if not text.isdecimal() or int(text) > largest:
        raise RequestError("invalid_value", f"{name} takes 0 to {largest:g}.", name)
    return float(text)


async def _is_at_end(found: Found, cursor: Cursor) -> bool:
    if cursor.part is not None:
        return False
    _, has_ended = await found.log.read(cursor.seq, 1)
    return has_ended and cursor.seq == found.log.next_seq - 1


async def _state(found: Found) -> dict[str, Any]:
    """What a client may know of a stream, with the whole answer once there is one."""
    record, log = found.record, found.log
    shown: dict[str, Any] = {
        "id": record.id,
        "object": "stream",
        "state": found.state,
        "mode": record.mode,
        "durable": record.is_durable,
        "last_seq": log.next_seq - 1,
        "total_bytes": len(await body_bytes(record, log)),
        "created": record.created,
        "model": record.request.model,
    }
    last, _ = await log.read(log.next_seq - 2, 1)
    if not isinstance(last[0], Finish | Error):
        return shown
    whole = Answer(record)
    async for event in follow(log):
        whole.feed(event)
    name = "error" if isinstance(last[0], Error) else "response"
    shown["state"] = _outcome(last[0])
    body = decode(whole.body())
    shown[name] = body["error"] if name == "error" else body
    return shown


def _outcome(last: Finish | Error) -> str:
    if isinstance(last, Finish):
        return "finished"
    is_stop = last.type == "cancelled_error"
    return "cancelled" if is_stop else "failed"
