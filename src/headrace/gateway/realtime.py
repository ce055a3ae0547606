"""Serves `/v1/realtime-text`, which runs many requests on one WebSocket.

Each request is a reader of its stream's log. A request on a socket behaves like a request on a
separate connection. `detach` acts like the end of this connection.
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
from headrace.gateway.delivery import LiveAnswer, Pace, unless_left
from headrace.gateway.http_responses import notice_of
from headrace.gateway.native_routes import read_cursor
from headrace.gateway.request_bodies import Bodies
from headrace.generation.generation import Generation
from headrace.generation.registry import Found
from headrace.intake.intake import Intake, names_of
from headrace.protocols.dialect import DIALECTS, encode
from headrace.streams.events import AnyEvent, is_terminal
from headrace.streams.store import ById, StoreStalled
from headrace.workers.loop_slices import slice_of_loop
from headrace_common.config.settings import StreamConfig
from headrace_common.errors import RequestError
from headrace_common.ids import StreamId
from headrace_common.log_context import begin_notes, log_request
from headrace_common.system import awake
from headrace_common.worker_jobs import CheckedBody, ReadBody

MAX_RUNNING = 256
HELLO_S = 5.0
# Maximum number of bytes in a message, not counting the field `body`.
ENVELOPE_BYTES = 4096
GOING_AWAY = 1001
_MAX_ID, _BAD_KEY = 128, 1008
# Maximum number of characters in a text field whose exact limit is checked later.
_MAX_TEXT = 4096
# Maximum number of digits in the seq of an event.
_MAX_DIGITS = 15
# Maximum number of bytes for one character in JSON: an escaped surrogate pair.
_MOST_BYTES = 12
# Maximum number of commas in a frame. Skipping a value takes up to 0.1 µs of the event loop.
MAX_COMMAS = 1 << 20
FAREWELL_S = 4.0
_WATCH_S = 0.5
# The subprotocol that OpenAI's clients offer. Browsers close a socket if the server chooses none
# of the offered subprotocols.
_SUBPROTOCOL = "realtime"
# Prefix of a subprotocol that contains a key. The server never chooses such a subprotocol,
# because the server's choice is sent back to the client.
_KEY_PREFIX = "openai-insecure-api-key."

_FIELDS = (
    "type", "id", "api_key", "stop", "detach", "stream", "after",
    "route", "body", "conversation_id", "idempotency_key", "stream_id",
)  # fmt: skip
_ABSENT = msgspec.Raw()
_Frame = msgspec.defstruct("_Frame", [(name, msgspec.Raw, _ABSENT) for name in _FIELDS])
_frame_of = msgspec.json.Decoder(_Frame).decode


class RealtimeSockets(NamedTuple):
    """Serves all realtime sockets of one server."""

    generation: Generation
    config: StreamConfig
    auth: Auth
    bodies: Bodies
    intake: Intake

    async def serve(self, socket: WebSocket) -> None:
        """Serve one socket.

        Ends when the client leaves or sends a wrong key, or when the server shuts down.
        """
        with contextlib.suppress(ClientLeft):
            await accept(socket)
            await self._serve(socket)

    async def _serve(self, socket: WebSocket) -> None:
        headers = with_key(socket)
        try:
            self.auth.check_page(headers)
            try:
                self.auth.check(headers)
            except RequestError as refused:
                if refused.code != "invalid_api_key":
                    raise
                headers = await _headers_of_hello(socket)
                self.auth.check(headers)
        except RequestError as refused:
            await send_frame(socket, _refusal(None, refused))
            await socket.close(_BAD_KEY, refused.code)
            return
        await RealtimeSocket(self, socket, headers).run()


async def accept(socket: WebSocket) -> None:
    """Accept a socket, with OpenAI's subprotocol if the client offers it.

    Raise ClientLeft if the client has left.
    """
    offered = socket.scope.get("subprotocols", ())
    try:
        await socket.accept(_SUBPROTOCOL if _SUBPROTOCOL in offered else None)
    except (RuntimeError, OSError, WebSocketDisconnect):
        raise ClientLeft from None


def with_key(socket: WebSocket) -> Headers:
    """Return the client's headers, and add the key that a browser may send as a subprotocol."""
    offered = socket.scope.get("subprotocols", ())
    key = next((it.removeprefix(_KEY_PREFIX) for it in offered if it.startswith(_KEY_PREFIX)), "")
    if not key or not key.isascii():
        return socket.headers
    return Headers(raw=[*socket.headers.raw, (b"x-api-key", key.encode())])


async def _headers_of_hello(socket: WebSocket) -> Headers:
    """Return headers with the key that a client sends in its first frame."""
    refused = RequestError(
        "invalid_api_key",
        "The connection has no valid key; send it in a header, or within 5 s as the first frame "
        '{"type": "hello", "api_key": KEY}.',
    )
    try:
        async with awake.within(HELLO_S):
            fields = fields_of(await socket.receive())
        key = text_of(fields, "api_key", 4096)
    except (TimeoutError, RequestError):
        raise refused from None
    if text_of(fields, "type", 64) != "hello" or key is None or not key.isascii():
        raise refused
    others = [item for item in socket.headers.raw if item[0] in (b"host", b"origin")]
    return Headers(raw=[*others, (b"x-api-key", key.encode())])


def note_refusal(generation: Generation, socket: WebSocket, error: RequestError) -> None:
    """Count a refused request, and write its line to the log."""
    generation.metrics.server.refused(error)
    log_request(socket.scope["path"], error.code, status=error.kind.status, **error.noted)


class ClientLeft(Exception):
    """Raised when the client has closed the socket, or when its connection has ended."""


class SocketRequest:
    """One request on a socket. The request takes the role of an HTTP connection."""

    def __init__(self, id: str) -> None:
        self.id = id
        # The stream; None until the stream is open.
        self.stream: Found | None = None
        self.is_stopped = False
        self.left = asyncio.Event()
        self.ended = asyncio.Event()

    async def receive(self) -> Message:
        """Wait until the client detaches or leaves, as ASGI's `receive` does after the body."""
        await self.left.wait()
        return {"type": "http.disconnect"}


class OpenedStream(NamedTuple):
    """Holds the stream of a request, and the seq after which reading starts."""

    stream: Found
    after: int = -1


class RealtimeSocket:
    """Handles the requests of one socket.

    `run` owns the tasks of these requests, and ends after all tasks have ended.
    """

    def __init__(self, sockets: RealtimeSockets, socket: WebSocket, headers: Headers) -> None:
        self._sockets = sockets
        self._generation = sockets.generation
        self._socket = socket
        self._headers = headers
        self._owner = sockets.auth.owner(headers)
        self._requests: dict[str, SocketRequest] = {}
        self._tasks = asyncio.TaskGroup()

    async def run(self) -> None:
        async with self._tasks:
            watching = self._tasks.create_task(self._watch_drain())
            try:
                while True:
                    # No variable here keeps the frame, which can be large, until the next frame.
                    await self._take(await self._socket.receive())
            except ClientLeft:
                for request in self._requests.values():
                    request.left.set()
            finally:
                watching.cancel()

    async def _take(self, message: Message) -> None:
        # Thousands of small frames can already have arrived.
        await slice_of_loop()
        if message.get("code") == GOING_AWAY:
            await self._shut_down()
        await self._handle_frame(message)

    async def _shut_down(self) -> None:
        """Wait a few seconds until running requests have ended, then close the socket."""
        ends = [request.ended.wait() for request in self._requests.values()]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_S):
                await asyncio.gather(*ends)
        with contextlib.suppress(RuntimeError, OSError):
            await self._socket.close(GOING_AWAY)

    async def _watch_drain(self) -> None:
        """Notify the client once that the server is draining."""
        is_draining = False
        while not is_draining:
            await asyncio.sleep(_WATCH_S)
            is_draining = self._generation.state == "draining"
        with contextlib.suppress(ClientLeft):
            await self._send(encode({"type": "notification", "notice": "draining"}))

    async def _send(self, frame: bytes) -> None:
        await send_frame(self._socket, frame)

    async def _handle_frame(self, message: Message) -> None:
        """Handle one frame. Report an error to the client, and keep the socket open."""
        id = None
        try:
            fields = fields_of(message)
            if "id" in fields:
                id = text_of(fields, "id", _MAX_ID)
            kind = text_of(fields, "type", 64)
            if kind == "notification":
                self._notify(fields)
            elif kind in ("request", "attach"):
                self._start(id, kind, fields)
            elif kind != "hello":
                # A second `hello` is ignored, since it does no harm.
                known = "request, attach or notification"
                raise RequestError("invalid_value", f"type must be {known}.", "type")
        except RequestError as refused:
            await self._refuse(id, refused)

    async def _refuse(self, id: str | None, error: RequestError) -> None:
        note_refusal(self._generation, self._socket, error)
        await self._send(_refusal(id, error))

    def _notify(self, fields: dict[str, msgspec.Raw]) -> None:
        stop, detach = (text_of(fields, name, _MAX_ID) for name in ("stop", "detach"))
        if stop is None and detach is None:
            message = "A notification needs stop or detach, with the id of a request."
            raise RequestError("missing_required_parameter", message, "stop")
        if (request := self._requests.get(stop or "")) is not None and not request.is_stopped:
            request.is_stopped = True
            self._tasks.create_task(self._stop(request))
        if (request := self._requests.get(detach or "")) is not None:
            request.left.set()

    async def _stop(self, request: SocketRequest) -> None:
        if request.stream is not None:
            with contextlib.suppress(StoreStalled):
                await self._generation.streams.stop(request.stream)

    def _start(self, id: str | None, kind: str, fields: dict[str, msgspec.Raw]) -> None:
        # The key may have been revoked since the socket was opened.
        self._sockets.auth.check(self._headers)
        if id is None:
            raise RequestError("missing_required_parameter", "id is required.", "id")
        if id in self._requests:
            message = "A request with this id is running on this socket; choose another id."
            raise RequestError("duplicate_id", message, "id")
        if len(self._requests) >= MAX_RUNNING:
            message = (
                f"This socket already runs {MAX_RUNNING} requests, which is the limit. Wait until "
                "a request has ended, or open another socket."
            )
            raise RequestError("server_overloaded", message, retry_after_s=1)
        request = self._requests[id] = SocketRequest(id)
        work = self._request(request, fields) if kind == "request" else self._attach(fields)
        self._tasks.create_task(self._serve(request, work))

    async def _serve(self, request: SocketRequest, work: Any) -> None:
        """Serve one request from its message to its last frame."""
        begin_notes()
        try:
            stream, after = await work
            request.stream = stream
            if request.is_stopped:
                self._tasks.create_task(self._stop(request))
            view = SocketView(request.id, stream)
            pace = Pace(self._sockets.config.heartbeat_s)
            send = self._sender(request, view)
            # Each message on a socket carries one event.
            live = LiveAnswer(stream, view, pace, after, num_joined=1)
            await live(SCOPE, request.receive, send)
            if view.is_silent and not request.left.is_set():
                message = "The stream has no events after this cursor."
                await self._send(_notice(request.id, "at_end", message))
        except ClientLeft:
            pass
        except Exception as error:
            if not request.left.is_set():
                with contextlib.suppress(ClientLeft):
                    await self._refuse(request.id, notice_of(error))
        finally:
            request.ended.set()
            if self._requests.get(request.id) is request:
                del self._requests[request.id]

    def _sender(self, request: SocketRequest, view: "SocketView") -> Send:
        async def send(message: Message) -> None:
            if view.has_ended and self._requests.get(request.id) is request:
                # Free the id before the client receives the end, since the client may then use
                # the id again.
                del self._requests[request.id]
            try:
                if body := message.get("body"):
                    await self._send(body)
            except ClientLeft:
                request.left.set()

        return send

    async def _request(
        self, request: SocketRequest, fields: dict[str, msgspec.Raw]
    ) -> OpenedStream:
        route = text_of(fields, "route", 256)
        if route is None or "body" not in fields:
            missing = "body" if route else "route"
            raise RequestError("missing_required_parameter", f"{missing} is required.", missing)
        if route not in DIALECTS:
            message = f"{route} is not a route of this socket; use one of {', '.join(DIALECTS)}."
            raise RequestError("route_not_found", message, "route")
        names = [text_of(fields, name, None) for name in ("conversation_id", "idempotency_key")]
        patience_s = self._sockets.config.linger_s if names == [None, None] else None
        opening = self._open(request, route, fields, *names)
        return OpenedStream(await unless_left(request.receive, opening, patience_s))

    async def _open(
        self,
        request: SocketRequest,
        route: str,
        fields: dict[str, msgspec.Raw],
        conversation: str | None,
        key: str | None,
    ) -> Found:
        checked = await self._read(route, fields)
        checked = self._sockets.auth.limit_priority(self._headers, checked)
        names = names_of(self._owner, checked, conversation, key)
        if request.is_stopped:
            raise RequestError("cancelled", "The request was stopped.")
        return (await self._sockets.intake.open(route, checked, names)).stream

    async def _read(self, route: str, fields: dict[str, msgspec.Raw]) -> CheckedBody:
        """Read the body, and free the frame. The request may have to wait long for its model."""
        body = bytes(fields["body"])
        fields.clear()
        with self._sockets.bodies.hold(len(body)):
            return await self._sockets.intake.read(ReadBody(route), [body])

    async def _attach(self, fields: dict[str, msgspec.Raw]) -> OpenedStream:
        stream_id = text_of(fields, "stream", 256)
        if stream_id is None:
            raise RequestError("missing_required_parameter", "stream is required.", "stream")
        after = _cursor(fields)
        found = await self._generation.streams.find(self._owner, ById(StreamId(stream_id)))
        if found is None:
            raise RequestError("stream_not_found", "This stream does not exist, or it has expired.")
        cursor = await read_cursor(after, found, self._generation.streams)
        return OpenedStream(found, cursor.after)


SCOPE: Scope = {"type": "http"}


class SocketView:
    """Renders a stream's events as messages for one request."""

    media_type = "application/json"

    def __init__(self, id: str, stream: Found) -> None:
        self.id = id
        # True until an event of the log has been sent.
        self.is_silent = True
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


async def send_frame(socket: WebSocket, frame: bytes) -> None:
    """Send a frame. Wait until the client has accepted the earlier frames.

    Raise ClientLeft if the client has left.
    """
    try:
        await socket.send({"type": "websocket.send", "text": frame.decode()})
    except (RuntimeError, OSError, WebSocketDisconnect):
        raise ClientLeft from None


def fields_of(message: Message) -> dict[str, msgspec.Raw]:
    """Return the known fields of a frame without decoding them: a worker decodes the body.

    Unknown fields are skipped, because keeping a million fields would block the event loop.
    """
    if message["type"] == "websocket.disconnect":
        raise ClientLeft
    text = message.get("text")
    if text is None:
        raise RequestError(
            "invalid_json", "Send one JSON object per text frame, and no binary frames."
        )
    if (num_commas := text.count(",")) > MAX_COMMAS:
        shown = f"The frame has {num_commas:,} commas; the limit on a WebSocket is {MAX_COMMAS:,}. "
        raise RequestError("request_too_large", f"{shown}Send the body by HTTP.")
    try:
        frame = _frame_of(text)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        raise RequestError("invalid_json", "The frame must be one JSON object.") from None
    found = msgspec.structs.asdict(frame)
    return {name: raw for name, raw in found.items() if raw is not _ABSENT}


def _cursor(fields: dict[str, msgspec.Raw]) -> str | None:
    """Return the field `after`, which may be a string or a number."""
    raw = memoryview(fields.get("after", b"null"))
    number = bytes(raw[: _MAX_DIGITS + 1])
    if number.isdigit() and len(number) <= _MAX_DIGITS:
        return number.decode()
    return text_of(fields, "after", None)


def text_of(fields: dict[str, msgspec.Raw], name: str, most: int | None) -> str | None:
    """Return a text field of 1 to `most` characters; None if the field is absent or null."""
    raw = memoryview(fields.get(name, b"null"))
    limit = _MAX_TEXT if most is None else most
    # The length is checked first, because decoding a long text would block the event loop.
    if raw.nbytes > _MOST_BYTES * limit + 2:
        raise RequestError("invalid_value", f"{name} must have 1 to {limit} characters.", name)
    try:
        value = msgspec.json.decode(raw, type=str | None)
    except msgspec.DecodeError:
        raise RequestError("invalid_type", f"{name} must be a string.", name) from None
    if value is not None and most is not None and not 0 < len(value) <= most:
        raise RequestError("invalid_value", f"{name} must have 1 to {most} characters.", name)
    return value
