"""Brings a stream to the client that asked for it, and notices when that client leaves.

A client that left is a reader that left; what becomes of the stream is decided elsewhere.
"""

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.gateway.http_responses import cut, notice_of, request_id_of
from headrace.generation.registry import Found
from headrace.intake.answers import NUM_NEW, AnswerBody, encoded, is_old
from headrace.protocols.dialect import PING, SIGN_S, UnnamedFrames, WireFrames, dialect_of
from headrace.streams.events import Accepted, AnyEvent, Heartbeat, Tokens
from headrace.streams.record import Record
from headrace.workers.loop_slices import slice_of_loop
from headrace_common.config.settings import StreamConfig
from headrace_common.errors import RequestError
from headrace_common.system.race import race

T = TypeVar("T")

_PAGE = 256


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`; None if the client left first, which cancels it.

    Leaving is noticed by reading the socket: a write to a dead one can succeed for minutes.
    """
    async with race(work, _left(receive)) as (working, _):
        return working.result() if working.done() else None


async def unless_left(
    receive: Receive, work: Coroutine[Any, Any, T], patience_s: float | None = 0.0
) -> T:
    """The result of `work`; ClientDisconnect if it is not done `patience_s` after the client left.

    With None it is waited for, however long it takes.
    """
    async with race(work, _left(receive)) as (working, _):
        if not working.done():
            await asyncio.wait((working,), timeout=patience_s)
        if not working.done():
            raise ClientDisconnect
        result: T = working.result()
        return result


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class WholeAnswer:
    """One body once the stream has ended; nothing precedes it."""

    def __init__(self, stream: Found, headers: Mapping[str, str]) -> None:
        self._stream = stream
        self._headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def deliver() -> None:
            answer = AnswerBody(self._stream.record)
            async with self._stream.audience.reader() as reader:
                try:
                    last = await answer.gather(self._stream.log)
                except Exception as error:
                    raise notice_of(error) from None
                response = await self._response(answer, request_id_of(scope))
                response.headers.update(self._headers)
                await response(scope, receive, send)
                reader.sent(last)

        await while_connected(receive, self._stream.audience.pause.unless(deliver()))

    async def _response(self, answer: AnswerBody, request_id: str) -> Response:
        record = self._stream.record
        if answer.error:
            return cut(answer.error, record, request_id)
        body = await answer.body()
        return Response(body, 200, {"X-Stream-Id": record.id}, "application/json")


class AnswerSoFar:
    """The answer so far, at once, in a dialect whose body can tell that it is unfinished.

    The client need not stay.
    """

    def __init__(self, stream: Found, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        self._stream = stream
        self._headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await unless_left(receive, self._response())
        response.headers.update(self._headers)
        await response(scope, receive, send)

    async def _response(self) -> Response:
        record, log = self._stream.record, self._stream.log
        body = dialect_of(record.request.route).response_body(record)
        after, last = -1, log.next_seq - 1
        while after < last:
            page, _ = await log.read(after, _PAGE)
            for event in page:
                await slice_of_loop()
                body.feed(event)
            after = page[-1].seq
        return Response(await encoded(body), 200, {"X-Stream-Id": record.id}, "application/json")


class Rendering(Protocol):
    """The rendering of a live answer."""

    @property
    def media_type(self) -> str: ...

    def render(self, event: AnyEvent) -> list[bytes]:
        """Data that the event adds."""

    def idle(self, form: str) -> bytes:
        """A sign of life that adds nothing, as data or comment."""

    def failure(self, error: RequestError) -> bytes:
        """The end of an answer that cannot be rendered further."""


class LiveBody:
    """One JSON body, before which newlines show that the server lives."""

    media_type = "application/json"

    def __init__(self, answer: AnswerBody) -> None:
        self._answer = answer

    def render(self, event: AnyEvent) -> list[bytes]:
        self._answer.feed(event)
        return []

    async def whole(self) -> bytes:
        """The body, which follows the last event."""
        return await self._answer.body()

    def idle(self, form: str) -> bytes:
        return b"\n"

    def failure(self, error: RequestError) -> bytes:
        return self._answer.failure(error)


class Pace(NamedTuple):
    """How long a connection may be silent; seconds, inf for ever.

    Where every byte counts, heartbeats are events: `is_logged`. A sign is an event on every wire,
    because what follows it depends on it.
    """

    heartbeat_s: float
    ping_s: float = math.inf
    is_logged: bool = False
    sign_s: float = math.inf

    def own(self) -> "Pace":
        """The pace up to a fifth faster: answers that began together must not all write at once."""
        share = random.uniform(0.8, 1.0)
        return self._replace(heartbeat_s=share * self.heartbeat_s, ping_s=share * self.ping_s)


class LiveAnswer:
    """Status and headers at once, then data as it comes, and signs of life in between."""

    def __init__(
        self,
        stream: Found,
        rendering: Rendering,
        pace: Pace,
        after: int = -1,
        headers: Mapping[str, str] = MappingProxyType({}),
        finish: Callable[[], Awaitable[bytes]] | None = None,
        num_joined: int = NUM_NEW,
    ) -> None:
        """`finish` makes the bytes that follow the last event.

        Frames of up to `num_joined` events that were written together are sent in one message.
        """
        self._headers = headers
        self._finish = finish
        self._num_joined = num_joined
        self._stream = stream
        self._rendering = rendering
        self.pace = pace.own()
        self._after = after
        self._data_at = self._byte_at = self._sign_at = 0.0  # when the last of each was written
        self._writing = asyncio.Lock()
        self._has_ended = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {
            "content-type": self._rendering.media_type,
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
            "x-stream-id": self._stream.record.id,
            "x-stream-mode": self._stream.record.mode,
            **self._headers,
        }
        raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        await while_connected(receive, self._deliver(send))

    async def _deliver(self, send: Send) -> None:
        self._data_at = self._byte_at = self._sign_at = asyncio.get_running_loop().time()
        beating = asyncio.create_task(self._beat(send))
        try:
            await self._stream.audience.pause.unless(self._follow(send))
        except Exception as error:
            notice = notice_of(error)
            if not self.pace.is_logged:  # there, bytes that are no event would shift the others
                await self._write(send, self._rendering.failure(notice))
        finally:
            beating.cancel()
        async with self._writing:
            self._has_ended = True
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _follow(self, send: Send) -> None:
        """Send the events of the log. To developers: this runs for every token."""
        log, audience, pace = self._stream.log, self._stream.audience, self.pace
        async with audience.reader(self._after) as reader:
            after, has_ended = self._after, False
            while not has_ended:
                # 1. Wait for events and read all there are. What a few steps wrote is sent
                # together. A longer page is sent event by event, so that others have their turn.
                await log.wait(after)
                page, has_ended = await log.read(after, _PAGE)
                after += len(page)
                is_long = len(page) > self._num_joined
                messages = [[event] for event in page] if is_long else [page]
                for events in messages:
                    if is_long and is_old(log, events[0]):
                        await slice_of_loop()
                    # 2. Render them. If one fails, the frames before it are still sent.
                    frames, shown, failure = list[bytes](), list[AnyEvent](), None
                    try:
                        for event in events:
                            if rendered := self._rendering.render(event):
                                frames += rendered
                                shown.append(event)
                    except Exception as error:
                        failure = error
                    # 3. Send the frames, and note which events have reached the client. A logged
                    # comment comes back as an event, and may have lost its first bytes.
                    if frames:
                        is_data = not pace.is_logged or any(not PING.endswith(it) for it in frames)
                        await self._write(send, b"".join(frames), is_data)
                        if has_ended or not audience.has_seen_tokens:
                            for event in shown:
                                reader.sent(event)
                    if failure is not None:
                        raise failure
                    if pace.sign_s < math.inf and any(map(_is_sign, events)):
                        self._sign_at = asyncio.get_running_loop().time()
            if self._finish is not None:
                await self._write(send, await self._finish())
                reader.sent(page[-1])

    async def _beat(self, send: Send) -> None:
        """Sends heartbeats by the wall clock alone: whatever else waits, this does not."""
        clock = asyncio.get_running_loop().time
        while (due := self._due()) < math.inf:
            await asyncio.sleep(due - clock())
            if clock() >= self._sign_at + self.pace.sign_s:
                self._stream.beat("sign", self.pace.sign_s)
                self._sign_at = clock()
            elif clock() >= self._data_at + self.pace.heartbeat_s:
                await self._sign(send, "data")
            elif clock() >= self._byte_at + self.pace.ping_s:
                await self._sign(send, "comment")

    def _due(self) -> float:
        return min(
            self._data_at + self.pace.heartbeat_s,
            self._byte_at + self.pace.ping_s,
            self._sign_at + self.pace.sign_s,
        )

    async def _sign(self, send: Send, form: str) -> None:
        is_data = form == "data"
        if self.pace.is_logged:
            if not self._writing.locked():  # else the client has yet to take what there is
                interval_s = self.pace.heartbeat_s if is_data else self.pace.ping_s
                self._stream.beat(form, interval_s)  # it comes back as an event
            self._byte_at = asyncio.get_running_loop().time()
            if is_data:
                self._data_at = self._byte_at
        else:
            await self._write(send, self._rendering.idle(form), is_data)

    async def _write(self, send: Send, frame: bytes, is_data: bool = True) -> None:
        async with self._writing:
            if self._has_ended:
                return
            await send({"type": "http.response.body", "body": frame, "more_body": True})
            self._byte_at = asyncio.get_running_loop().time()
            if is_data:
                self._data_at = self._byte_at


def deliver(
    stream: Found, config: StreamConfig, headers: Mapping[str, str] = MappingProxyType({})
) -> WholeAnswer | LiveAnswer | AnswerSoFar:
    """Return the answer in the form that the request asked for, with these headers."""
    record = stream.record
    options = record.request.response_options
    if options.stream:
        pace = pace_of(record, config)
        frames = WireFrames(record) if record.names.is_opted_in else UnnamedFrames(record)
        return LiveAnswer(stream, frames, pace, headers=headers)
    if options.background:
        return AnswerSoFar(stream, headers)
    if options.heartbeat:
        body = LiveBody(AnswerBody(record))
        pace = Pace(config.heartbeat_s)
        return LiveAnswer(stream, body, pace, headers=headers, finish=body.whole)
    return WholeAnswer(stream, headers)


def _is_sign(event: AnyEvent) -> bool:
    """Whether every client counts its frames as a sign of life."""
    is_beat = isinstance(event, Heartbeat) and event.form == "sign"
    return is_beat or isinstance(event, Accepted | Tokens)


def pace_of(record: Record, config: StreamConfig) -> Pace:
    """The pace of a connection that carries the request's own frames."""
    options = record.request.response_options
    ping_s = options.ping_interval_s or config.sse_ping_interval
    return Pace(
        config.heartbeat_s if options.heartbeat else math.inf,
        ping_s if ping_s > 0 else math.inf,
        is_logged=record.names.conversation is not None,
        sign_s=SIGN_S.get(record.request.route, math.inf) if options.heartbeat else math.inf,
    )
