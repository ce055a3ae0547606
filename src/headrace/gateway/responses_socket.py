"""Serves `/v1/responses` as a WebSocket: many responses on one connection.

A response on a socket behaves like the streamed answer of a POST. Each event is one message. A
client that closes the socket has left, like one that closes the connection of a POST.

Messages with the same `stream_id` form a channel and are answered one after another; the events
of their responses repeat the id. Messages without the field share one channel. Channels run in
parallel.
"""

import asyncio
import contextlib
import math
from collections import deque
from typing import Any, NamedTuple

import msgspec
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import Message
from starlette.websockets import WebSocket

from headrace.gateway.auth import Auth
from headrace.gateway.delivery import LiveAnswer, pace_of, unless_left
from headrace.gateway.http_responses import new_request_id, notice_of, refuse
from headrace.gateway.realtime import (
    FAREWELL_S,
    GOING_AWAY,
    SCOPE,
    ClientLeft,
    accept,
    fields_of,
    note_refusal,
    send_frame,
    text_of,
    with_key,
)
from headrace.gateway.request_bodies import Bodies
from headrace.generation.generation import Generation
from headrace.generation.registry import Found
from headrace.intake.intake import Intake, names_of
from headrace.protocols.dialect import encode
from headrace.protocols.openai.responses import ROUTE, ResponseFrames
from headrace.streams.events import AnyEvent
from headrace.streams.record import Record
from headrace.streams.store import ById, StoreStalled
from headrace.workers.loop_slices import slice_of_loop
from headrace_common.config.settings import StreamConfig
from headrace_common.errors import RequestError
from headrace_common.ids import StreamId
from headrace_common.log_context import begin_notes

# Maximum number of messages of one socket that wait for the running response.
MAX_WAITING = 16
# Maximum number of channels that run at the same time, besides the channel without a `stream_id`.
MAX_CHANNELS = 16
_MAX_ID = 128
# Number of responses with `store: false` that the client can continue on the same socket.
_NUM_CONTINUABLE = 16
_KEEPALIVE: dict[str, Any] = {"type": "keepalive", "sequence_number": 0}


class ResponseSockets(NamedTuple):
    """Serves the sockets of one server."""

    generation: Generation
    config: StreamConfig
    auth: Auth
    bodies: Bodies
    intake: Intake

    async def serve(self, socket: WebSocket) -> None:
        """Serve one socket until the client leaves or the server shuts down."""
        headers = with_key(socket)
        try:
            self.auth.check_page(headers)
            self.auth.check(headers)
        except RequestError as refused:
            note_refusal(self.generation, socket, refused)
            response = refuse(refused, ROUTE, new_request_id(headers))
            await socket.send_denial_response(response)
            return
        with contextlib.suppress(ClientLeft):
            await accept(socket)
            await ResponseSocket(self, socket, headers).run()


class _WaitingMessage(NamedTuple):
    """A message that waits. Its bytes count towards the memory limit until `held` is closed."""

    message: Message
    # The error to answer with; None if the fields of the message are valid.
    fault: RequestError | None
    held: contextlib.ExitStack


class _Channel:
    """The messages with one `stream_id`, which wait for their turn."""

    def __init__(self, stream_id: str | None) -> None:
        self.stream_id = stream_id
        self.waiting: deque[_WaitingMessage] = deque()

    def tag(self, frame: dict[str, Any]) -> bytes:
        """Return a message of the server as JSON, with the `stream_id` of this channel."""
        return encode(frame if self.stream_id is None else frame | {"stream_id": self.stream_id})


class _OpenedResponse(NamedTuple):
    """The stream of a response, and whether it is deleted when the socket closes."""

    stream: Found
    is_unstored: bool


class ResponseSocket:
    """Answers the messages of one socket. `run` owns the tasks that answer, one per channel."""

    def __init__(self, sockets: ResponseSockets, socket: WebSocket, headers: Headers) -> None:
        self._sockets = sockets
        self._generation = sockets.generation
        self._socket = socket
        self._headers = headers
        self._owner = sockets.auth.owner(headers)
        # The channels that are being answered, and their tasks.
        self._channels: dict[str | None, _Channel] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self._left = asyncio.Event()
        # The last responses with `store: false` that were delivered on this socket.
        self._unstored: deque[StreamId] = deque()

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                # The socket is read at all times, because only a pending read reveals that the
                # client has left.
                while (message := await self._socket.receive())["type"] == "websocket.receive":
                    # Thousands of small messages can already have arrived.
                    await slice_of_loop()
                    await self._take(message, tasks)
                    # The message can be large, and the next message may come much later.
                    del message
                if message.get("code") == GOING_AWAY:
                    if self._answering:
                        await asyncio.wait(self._answering, timeout=FAREWELL_S)
                    with contextlib.suppress(RuntimeError, OSError):
                        await self._socket.close(GOING_AWAY)
                self._left.set()
        finally:
            for channel in self._channels.values():
                for waiting in channel.waiting:
                    waiting.held.close()
            await self._forget(0)

    async def _take(self, message: Message, tasks: asyncio.TaskGroup) -> None:
        """Add a message to its channel, or refuse it if too many messages or bytes are waiting."""
        stream_id, fault = _read_head(message)
        channel = self._channels.get(stream_id) or _Channel(stream_id)
        with contextlib.ExitStack() as held:
            try:
                if sum(len(it.waiting) for it in self._channels.values()) >= MAX_WAITING:
                    text = (
                        f"{MAX_WAITING} messages already wait on this socket, which is the limit. "
                        "Wait until a response has ended, or open another socket."
                    )
                    raise RequestError("server_overloaded", text, retry_after_s=1)
                num_others = len(self._channels.keys() - {None, stream_id})
                if stream_id is not None and num_others >= MAX_CHANNELS:
                    text = (
                        f"{MAX_CHANNELS} values of stream_id already have a response on this "
                        "socket, which is the limit. Wait until one has ended, or open another "
                        "socket."
                    )
                    raise RequestError("server_overloaded", text, retry_after_s=1)
                sent = message.get("bytes") or (message.get("text") or "").encode()
                held.enter_context(self._sockets.bodies.hold(len(sent)))
            except RequestError as refused:
                await self._refuse(channel, refused)
                return
            channel.waiting.append(_WaitingMessage(message, fault, held.pop_all()))
        if stream_id not in self._channels:
            self._channels[stream_id] = channel
            task = tasks.create_task(self._answer_all(channel))
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)

    async def _answer_all(self, channel: _Channel) -> None:
        while channel.waiting and not self._left.is_set():
            waiting = channel.waiting.popleft()
            with waiting.held as held:
                begin_notes()
                work = self._open(waiting, held)
                # The message may be large, and is no longer needed once its body has been read.
                del waiting
                linger_s = self._sockets.config.linger_s
                opening = asyncio.create_task(unless_left(self._receive, work, linger_s))
                try:
                    await self._answer(channel, opening)
                except ClientDisconnect:
                    pass
                except Exception as error:
                    await self._refuse(channel, notice_of(error))
                finally:
                    opening.cancel()
                    self._generation.metrics.server.frames_ended(channel)
        if not channel.waiting:
            del self._channels[channel.stream_id]

    async def _answer(self, channel: _Channel, opening: "asyncio.Task[_OpenedResponse]") -> None:
        """Send heartbeats until the stream is open, and then the events of the stream."""
        while not opening.done():
            await asyncio.wait((opening,), timeout=self._sockets.config.heartbeat_s)
            if not opening.done():
                await self._send(channel.tag(_KEEPALIVE))
        stream, is_unstored = opening.result()
        if is_unstored:
            # Recorded at once, so that the response is also deleted if the client leaves early.
            self._unstored.append(stream.record.id)
        # A comment cannot be sent as a message. The WebSocket's own pings replace comments.
        pace = pace_of(stream.record, self._sockets.config)._replace(ping_s=math.inf)
        view = MessageLines(stream.record, channel)

        async def send_lines(message: Message) -> None:
            for line in message.get("body", b"").splitlines():
                await self._send(line)
                self._generation.metrics.server.frame_sent(channel)

        await LiveAnswer(stream, view, pace)(SCOPE, self._receive, send_lines)
        if is_unstored and not self._left.is_set():
            await self._forget(_NUM_CONTINUABLE)

    async def _open(self, waiting: _WaitingMessage, held: contextlib.ExitStack) -> _OpenedResponse:
        """Return the stream for a message. Free the message's bytes once a worker has read them."""
        if waiting.fault is not None:
            raise waiting.fault
        # The key may have been revoked since the socket was opened.
        self._sockets.auth.check(self._headers)
        intake, agent = self._sockets.intake, self._headers.get("user-agent", "")
        checked = await intake.read_from(agent, ROUTE, [waiting.message.pop("text").encode()])
        held.close()
        checked = self._sockets.auth.limit_priority(self._headers, checked)
        checked = msgspec.structs.replace(checked, fields={**checked.fields, "stream": True})
        names = names_of(self._owner, checked)
        is_unstored = checked.fields.get("store") is False and not names.is_in_conversation
        names = msgspec.structs.replace(names, is_kept=names.is_kept or is_unstored)
        return _OpenedResponse((await intake.open(ROUTE, checked, names)).stream, is_unstored)

    async def _forget(self, num_left: int) -> None:
        """Delete responses with `store: false`, except the newest `num_left`."""
        while len(self._unstored) > num_left:
            name = ById(self._unstored.popleft())
            # The responses are in memory, and are deleted even if the store is stalled.
            with contextlib.suppress(StoreStalled):
                await self._generation.streams.discard(self._owner, name)

    async def _receive(self) -> Message:
        """Wait until the client leaves, as ASGI's `receive` does after the body."""
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _refuse(self, channel: _Channel, error: RequestError) -> None:
        note_refusal(self._generation, self._socket, error)
        await self._send(channel.tag(error_message(error)))

    async def _send(self, frame: bytes) -> None:
        try:
            if not self._left.is_set():
                await send_frame(self._socket, frame)
        except ClientLeft:
            self._left.set()


def _read_head(message: Message) -> tuple[str | None, RequestError | None]:
    """Return a message's `stream_id`, and why the message is refused when its turn has come.

    The fields are read once, because finding them in a large message takes time on the event loop.
    """
    stream_id = None
    try:
        fields = fields_of(message)
        stream_id = text_of(fields, "stream_id", _MAX_ID)
        if text_of(fields, "type", 64) != "response.create":
            raise RequestError("invalid_value", "type must be response.create.", "type")
    except RequestError as fault:
        # The traceback would keep the message.
        return stream_id, fault.with_traceback(None)
    return stream_id, None


class MessageLines:
    """Renders the events of a stream as messages, one JSON object per line."""

    media_type = "application/json"

    def __init__(self, record: Record, channel: _Channel) -> None:
        self._frames = ResponseFrames(record)
        self._channel = channel
        tag = channel.tag({})[1:]
        self._end = b"," + tag if len(tag) > 1 else tag

    def render(self, event: AnyEvent) -> list[bytes]:
        return [self._line(frame) for frame in self._frames.render(event)]

    def idle(self, form: str) -> bytes:
        return self._line(self._frames.idle())

    def failure(self, error: RequestError) -> bytes:
        return self._channel.tag(error_message(error)) + b"\n"

    def _line(self, frame: bytes) -> bytes:
        """Return the data of a server-sent event, with the channel's `stream_id`, and a newline."""
        return frame.partition(b"data: ")[2].rstrip()[:-1] + self._end + b"\n"


def error_message(error: RequestError) -> dict[str, Any]:
    """Return an error in the format of OpenAI's WebSocket.

    The fields of an event `error` are repeated outside of `error`, because clients look for them
    in both places.
    """
    status, code = error.kind.status, error.code
    if (code, error.param) == ("stream_not_found", "previous_response_id"):
        # OpenAI's clients send the whole conversation again after this code.
        status, code = 400, "previous_response_not_found"
    event = {"code": code, "message": error.message, "param": error.param}
    shown: dict[str, Any] = {"type": "error", "status": status, "sequence_number": 0, **event}
    return shown | {"error": {"type": error.kind.type, **event, **error.extra}}
