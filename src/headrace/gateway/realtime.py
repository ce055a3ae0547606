"""`/v1/realtime-text`: many requests on one WebSocket, each a reader of its stream's log.

A request on a socket is a request on a connection of its own: `detach` is that connection's end.
"""

import asyncio
import contextlib
import math
from typing import Any, NamedTuple

import msgspec
from starlette.datastructures import Headers
from starlette.types import Message, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from headrace.gateway.auth import Auth
from headrace.gateway.bodies import Bodies
from headrace.gateway.delivery import LiveAnswer, Pace, unless_left
from headrace.gateway.http_responses import notice_of
from headrace.gateway.native_routes import parse
from headrace.generation.generation import Generation
from headrace.generation.registry import Found
from headrace.intake.intake import Intake, names_of
from headrace.protocols.dialect import DIALECTS, encode
from headrace.streams.events import AnyEvent, is_terminal
from headrace.streams.store import ById, StoreStalled
from headrace_common.config.settings import ServerConfig
from headrace_common.errors import RequestError
from headrace_common.ids import StreamId
from headrace_common.jobs import ReadBody
from headrace_common.log_context import begin_notes, log_request
from headrace_common.system import awake

MAX_RUNNING = 256
HELLO_S = 5.0
ENVELOPE_BYTES = 4096  # of a message, beside the body in it
GOING_AWAY = 1001
_MAX_ID, _BAD_KEY = 128, 1008
_MAX_TEXT = 4096  # characters of a field that is checked elsewhere
_MAX_DIGITS = 15  # of the number of an event
_MOST_BYTES = 12  # of one character in JSON, as an escaped surrogate pair
_FAREWELL_S = 4.0
_WATCH_S = 0.5
_SUBPROTOCOL = "realtime"  # which OpenAI's clients offer; browsers close unless one is chosen
_KEY_SENT = "openai-insecure-api-key."  # never chosen, for the choice is sent back

_FIELDS = (
    "type", "id", "api_key", "stop", "detach", "stream", "after",
    "route", "body", "conversation_id", "idempotency_key",
)  # fmt: skip
_ABSENT = msgspec.Raw()
_Frame = msgspec.defstruct("_Frame", [(name, msgspec.Raw, _ABSENT) for name in _FIELDS])
_frame_of = msgspec.json.Decoder(_Frame).decode


class RealtimeSockets:
    """Serves every socket of one server."""

    def __init__(
        self,
        generation: Generation,
        config: ServerConfig,
        auth: Auth,
        bodies: Bodies,
        intake: Intake,
    ) -> None:
        self.generation = generation
        self.config = config.streams
        self.bodies = bodies
        self.intake = intake
        self._auth = auth

    async def serve(self, socket: WebSocket) -> None:
        """Serves until the client leaves, sends a bad key, or the server goes."""
        with contextlib.suppress(_Left):
            offered = socket.scope.get("subprotocols", ())
            await socket.accept(_SUBPROTOCOL if _SUBPROTOCOL in offered else None)
            await self._serve(socket)

    async def _serve(self, socket: WebSocket) -> None:
        headers = _with_key(socket)
        try:
            self._auth.check_page(headers)
            try:
                self._auth.check(headers)
            except RequestError as refused:
                if refused.code != "invalid_api_key":
                    raise
                headers = await _hello(socket)
                self._auth.check(headers)
        except RequestError as refused:
            await _send(socket, _refusal(None, refused))
            await socket.close(_BAD_KEY, refused.code)
            return
        await RealtimeSocket(self, socket, self._auth.owner(headers)).run()


def _with_key(socket: WebSocket) -> Headers:
    """Return a client's headers, with the key that a browser may send as a subprotocol."""
    offered = socket.scope.get("subprotocols", ())
    key = next((it.removeprefix(_KEY_SENT) for it in offered if it.startswith(_KEY_SENT)), "")
    if not key or not key.isascii():
        return socket.headers
    return Headers(raw=[*socket.headers.raw, (b"x-api-key", key.encode())])


async def _hello(socket: WebSocket) -> Headers:
    """The headers of a client that sends its key in the first frame."""
    refused = RequestError(
        "invalid_api_key",
        "No valid key; send it in a header, or as a first frame "
        '{"type": "hello", "api_key": KEY} within 5 s.',
    )
    try:
        async with awake.within(HELLO_S):
            fields = _read(await socket.receive())
        key = _text(fields, "api_key", 4096)
    except (TimeoutError, RequestError):
        raise refused from None
    if _text(fields, "type", 64) != "hello" or key is None or not key.isascii():
        raise refused
    others = [item for item in socket.headers.raw if item[0] in (b"host", b"origin")]
    return Headers(raw=[*others, (b"x-api-key", key.encode())])


class _Left(Exception):
    """The client closed the socket, or its connection ended."""


class Line:
    """One request on a socket: what HTTP would have a connection for."""

    def __init__(self, id: str) -> None:
        self.id = id
        self.stream: Found | None = None  # once it is open
        self.is_stopped = False
        self.left = asyncio.Event()
        self.ended = asyncio.Event()

    async def receive(self) -> Message:
        """ASGI's receive: nothing comes but the end."""
        await self.left.wait()
        return {"type": "http.disconnect"}


class Opening(NamedTuple):
    """How a line gets its stream, and the cursor behind which it is read."""

    stream: Found
    after: int = -1


class RealtimeSocket:
    """The lines of one socket. `run` owns their tasks, and outlives the client while they do."""

    def __init__(self, sockets: RealtimeSockets, socket: WebSocket, owner: str) -> None:
        self._sockets = sockets
        self._generation = sockets.generation
        self._socket = socket
        self._owner = owner
        self._lines: dict[str, Line] = {}
        self._tasks = asyncio.TaskGroup()

    async def run(self) -> None:
        async with self._tasks:
            watching = self._tasks.create_task(self._watch())
            try:
                while True:
                    message = await self._socket.receive()
                    if message.get("code") == GOING_AWAY:
                        await self._part()
                    await self._take(message)
            except _Left:
                for line in self._lines.values():
                    line.left.set()
            finally:
                watching.cancel()

    async def _part(self) -> None:
        """The server goes: what runs has its last words, then the socket is closed."""
        ends = [line.ended.wait() for line in self._lines.values()]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FAREWELL_S):
                await asyncio.gather(*ends)
        with contextlib.suppress(RuntimeError, OSError):
            await self._socket.close(GOING_AWAY)

    async def _watch(self) -> None:
        """Says once that the server is about to go."""
        is_draining = False
        while not is_draining:
            await asyncio.sleep(_WATCH_S)
            is_draining = self._generation.state == "draining"
        with contextlib.suppress(_Left):
            await self._send(encode({"type": "notification", "notice": "draining"}))

    async def _send(self, frame: bytes) -> None:
        await _send(self._socket, frame)

    async def _take(self, message: Message) -> None:
        """One frame; whatever is wrong with it is said, and the socket stays."""
        id = None
        try:
            fields = _read(message)
            if "id" in fields:
                id = _text(fields, "id", _MAX_ID)
            kind = _text(fields, "type", 64)
            if kind == "notification":
                self._notify(fields)
            elif kind in ("request", "attach"):
                self._begin(id, kind, fields)
            elif kind != "hello":  # a client that sends its key twice does no harm
                known = "request, attach or notification"
                raise RequestError("invalid_value", f"type is {known}.", "type")
        except RequestError as refused:
            await self._refuse(id, refused)

    async def _refuse(self, id: str | None, error: RequestError) -> None:
        self._generation.metrics.server.refused(error)
        log_request(self._socket.url.path, error.code, status=error.kind.status, **error.noted)
        await self._send(_refusal(id, error))

    def _notify(self, fields: dict[str, msgspec.Raw]) -> None:
        stop, detach = (_text(fields, name, _MAX_ID) for name in ("stop", "detach"))
        if stop is None and detach is None:
            raise RequestError("missing_required_parameter", "Name what to stop or detach.", "stop")
        if (line := self._lines.get(stop or "")) is not None:
            self._tasks.create_task(self._stop(line))
        if (line := self._lines.get(detach or "")) is not None:
            line.left.set()

    async def _stop(self, line: Line) -> None:
        line.is_stopped = True
        if line.stream is not None:
            with contextlib.suppress(StoreStalled):
                await self._generation.streams.stop(line.stream)

    def _begin(self, id: str | None, kind: str, fields: dict[str, msgspec.Raw]) -> None:
        if id is None:
            raise RequestError("missing_required_parameter", "id is required.", "id")
        if id in self._lines:
            raise RequestError("duplicate_id", "A request with this id runs; choose another.", "id")
        if len(self._lines) >= MAX_RUNNING:
            message = f"{MAX_RUNNING} requests run on this socket; wait, or open another."
            raise RequestError("server_overloaded", message, retry_after_s=1)
        line = self._lines[id] = Line(id)
        work = self._request(line, fields) if kind == "request" else self._attach(fields)
        self._tasks.create_task(self._serve(line, work))

    async def _serve(self, line: Line, work: Any) -> None:
        """A line from its message to its last frame."""
        begin_notes()
        try:
            stream, after = await work
            line.stream = stream
            if line.is_stopped:
                self._tasks.create_task(self._stop(line))
            view = SocketView(line.id, stream)
            pace = Pace(self._sockets.config.heartbeat_s)
            send = self._sender(line, view)
            live = LiveAnswer(stream, view, pace, after, num_joined=1)  # a message is one event
            await live(_SCOPE, line.receive, send)
            if view.is_silent and not line.left.is_set():
                await self._send(_notice(line.id, "at_end", "There is nothing behind this cursor."))
        except _Left:
            pass
        except Exception as error:
            if not line.left.is_set():
                with contextlib.suppress(_Left):
                    await self._refuse(line.id, notice_of(error))
        finally:
            line.ended.set()
            if self._lines.get(line.id) is line:
                del self._lines[line.id]

    def _sender(self, line: Line, view: "SocketView") -> Send:
        async def send(message: Message) -> None:
            if view.has_ended and self._lines.get(line.id) is line:
                del self._lines[line.id]  # free before the client sees the end
            try:
                if body := message.get("body"):
                    await self._send(body)
            except _Left:
                line.left.set()

        return send

    async def _request(self, line: Line, fields: dict[str, msgspec.Raw]) -> Opening:
        route = _text(fields, "route", 256)
        if route is None or "body" not in fields:
            missing = "body" if route else "route"
            raise RequestError("missing_required_parameter", f"{missing} is required.", missing)
        if route not in DIALECTS:
            message = f"No requests are taken by that route; there are {', '.join(DIALECTS)}."
            raise RequestError("route_not_found", message, "route")
        names = [_text(fields, name, None) for name in ("conversation_id", "idempotency_key")]
        patience_s = self._sockets.config.linger_s if names == [None, None] else None
        opening = self._open(line, route, bytes(fields.pop("body")), *names)
        return Opening(await unless_left(line.receive, opening, patience_s))

    async def _open(
        self, line: Line, route: str, body: bytes, conversation: str | None, key: str | None
    ) -> Found:
        intake = self._sockets.intake
        with self._sockets.bodies.hold(len(body)):
            checked = await intake.read(ReadBody(route), [body])
        names = names_of(self._owner, checked, conversation, key)
        if line.is_stopped:
            raise RequestError("cancelled", "The request was stopped.")
        return (await intake.open(route, checked, names)).stream

    async def _attach(self, fields: dict[str, msgspec.Raw]) -> Opening:
        stream_id = _text(fields, "stream", 256)
        if stream_id is None:
            raise RequestError("missing_required_parameter", "stream is required.", "stream")
        after = _cursor(fields)
        found = await self._generation.streams.find(self._owner, ById(StreamId(stream_id)))
        if found is None:
            raise RequestError("stream_not_found", "There is no such stream, or it has expired.")
        cursor = parse(after, found.record, found.log.next_seq)
        return Opening(found, cursor.after)


_SCOPE: Scope = {"type": "http"}


class SocketView:
    """A stream's events as messages of one line."""

    media_type = "application/json"

    def __init__(self, id: str, stream: Found) -> None:
        self.id = id
        self.is_silent = True  # nothing of the log was sent
        self.has_ended = False
        self._stream = stream

    def render(self, event: AnyEvent) -> list[bytes]:
        self.is_silent = False
        self.has_ended = is_terminal(event)
        return [self._message(encode(event))]

    def idle(self, form: str) -> bytes:
        beat = {"kind": "heartbeat", "state": self._stream.state, "form": form}
        return self._message(encode(beat))

    def failure(self, error: RequestError) -> bytes:
        self.is_silent, self.has_ended = False, True
        return _notice(self.id, error.code, error.message)

    def _message(self, event: bytes) -> bytes:
        stream = self._stream.record.id
        shown = {"type": "response", "id": self.id, "stream": stream, "event": msgspec.Raw(event)}
        return encode(shown)


def _notice(id: str, notice: str, message: str) -> bytes:
    return encode({"type": "notification", "id": id, "notice": notice, "message": message})


def _refusal(id: str | None, error: RequestError) -> bytes:
    kind = error.kind
    shown: dict[str, Any] = {
        "status": kind.status,
        "message": error.message,
        "type": kind.type,
        "param": error.param,
        "code": error.code,
        **error.extra,
    }
    if kind.status in (429, 503):
        shown["retry_after_ms"] = math.ceil(error.retry_after_s * 1000)
    return encode({"type": "error", "id": id, "error": shown})


async def _send(socket: WebSocket, frame: bytes) -> None:
    """Waits while the client has yet to take what there is; _Left once it has gone."""
    try:
        await socket.send({"type": "websocket.send", "text": frame.decode()})
    except (RuntimeError, OSError, WebSocketDisconnect):
        raise _Left from None


def _read(message: Message) -> dict[str, msgspec.Raw]:
    """The known fields of a frame, undecoded: a body is for a worker to look into.

    Others are skipped, not kept: a frame of a million of them would hold the loop.
    """
    if message["type"] == "websocket.disconnect":
        raise _Left
    text = message.get("text")
    if text is None:
        raise RequestError("invalid_json", "Send one JSON object per text frame, none in binary.")
    try:
        frame = _frame_of(text)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        raise RequestError("invalid_json", "The frame is not one JSON object.") from None
    found = msgspec.structs.asdict(frame)
    return {name: raw for name, raw in found.items() if raw is not _ABSENT}


def _cursor(fields: dict[str, msgspec.Raw]) -> str | None:
    """Return the field `after`, a string or a number."""
    raw = memoryview(fields.get("after", b"null"))
    number = bytes(raw[: _MAX_DIGITS + 1])
    if number.isdigit() and len(number) <= _MAX_DIGITS:
        return number.decode()
    return _text(fields, "after", None)


def _text(fields: dict[str, msgspec.Raw], name: str, most: int | None) -> str | None:
    """A field of text, of 1 to `most` characters; None if it is absent or null."""
    raw = memoryview(fields.get(name, b"null"))
    limit = _MAX_TEXT if most is None else most
    if raw.nbytes > _MOST_BYTES * limit + 2:  # before the loop spends its time on decoding it
        raise RequestError("invalid_value", f"{name} takes 1 to {limit} characters.", name)
    try:
        value = msgspec.json.decode(raw, type=str | None)
    except msgspec.DecodeError:
        raise RequestError("invalid_type", f"{name} must be a string.", name) from None
    if value is not None and most is not None and not 0 < len(value) <= most:
        raise RequestError("invalid_value", f"{name} takes 1 to {most} characters.", name)
    return value
