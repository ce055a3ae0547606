"""Sends a stream to the client that requested the stream, and notices when this client leaves.

When a client leaves, the stream only loses a reader. `generation` then decides whether the stream
continues.
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

from headrace.gateway.http_responses import failed_stream_answer, live_start, notice_of
from headrace.generation.readers import Reader
from headrace.generation.registry import Found
from headrace.intake.answers import NUM_NEW, AnswerBody, encoded, is_old
from headrace.protocols.dialect import PING, VISIBLE_SIGN_S, UnnamedFrames, WireFrames, dialect_of
from headrace.streams.events import Accepted, AnyEvent, Heartbeat, Tokens
from headrace.streams.record import Record
from headrace.workers.loop_slices import slice_of_loop
from headrace_common.config.settings import StreamConfig
from headrace_common.errors import RequestError
from headrace_common.system.race import race

T = TypeVar("T")

_PAGE = 256


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of `work`. If the client leaves first, cancel `work` and return None.

    The socket is read to notice that the client has left: writes to a dead socket can succeed for
    minutes.
    """
    async with race(work, _left(receive)) as (working, _):
        return working.result() if working.done() else None


async def unless_left(
    receive: Receive, work: Coroutine[Any, Any, T], patience_s: float | None = 0.0
) -> T:
    """Return the result of `work`; raise ClientDisconnect if the client leaves first.

    After the client has left, the work may take `patience_s` more seconds. If `patience_s` is
    None, the work may take as long as it needs.
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
    """Sends the whole answer as one body after the end of the stream, and sends nothing before."""

    def __init__(self, stream: Found, headers: Mapping[str, str]) -> None:
        self._stream = stream
        self._headers = headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pause, delivery = self._stream.audience.pause, self._deliver(scope, receive, send)
        async with race(delivery, _left(receive), pause.is_set.wait()) as (delivering, left, _):
            if delivering.done():
                delivering.result()
            elif not left.done():
                pause.check()

    async def _deliver(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = AnswerBody(self._stream.record)
        async with self._stream.audience.reader() as reader:
            try:
                last = await answer.gather(self._stream.log)
            except Exception as error:
                raise notice_of(error) from None
            response = await self._response(answer)
            response.headers.update(self._headers)
            await response(scope, receive, send)
            reader.sent(last)

    async def _response(self, answer: AnswerBody) -> Response:
        record = self._stream.record
        if answer.error:
            return failed_stream_answer(answer.error, record)
        body = await answer.body()
        return Response(body, 200, {"X-Stream-Id": record.id}, "application/json")


class AnswerSoFar:
    """Sends the existing part of the answer immediately.

    The dialect must have a way to mark a body as unfinished. The client is not a reader of the
    stream, so the stream is not affected if the client leaves.
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
        whole = await encoded(body.whole)
        return Response(whole, 200, {"X-Stream-Id": record.id}, "application/json")


class Rendering(Protocol):
    """Renders the events of a live answer as bytes."""

    @property
    def media_type(self) -> str: ...

    def render(self, event: AnyEvent) -> list[bytes]:
        """Return the data that the event adds to the answer."""

    def idle(self, form: str) -> bytes:
        """Return bytes that show that the server is alive, as data or as a comment."""

    def failure(self, error: RequestError) -> bytes:
        """Return the last bytes of an answer that cannot be completed."""


class LiveBody:
    """Renders one JSON body. Newlines before the body show that the server is alive."""

    media_type = "application/json"

    def __init__(self, answer: AnswerBody) -> None:
        self._answer = answer

    def render(self, event: AnyEvent) -> list[bytes]:
        self._answer.feed(event)
        return []

    async def whole(self) -> bytes:
        """Return the body, which is sent after the last event."""
        return await self._answer.body()

    def idle(self, form: str) -> bytes:
        return b"\n"

    def failure(self, error: RequestError) -> bytes:
        return self._answer.failure(error)


class Pace(NamedTuple):
    """Limits how long a connection may be silent, in seconds; infinity means no limit.

    `heartbeat_s` is the limit since the last data, and `ping_s` the limit since the last byte.
    `sign_s` is the limit since the last event that every client takes as a sign of life.

    If `is_logged`, clients count the bytes of the stream, so heartbeats are events of the log.
    The heartbeat after `sign_s` is always an event of the log, because later frames depend on
    this heartbeat.
    """

    heartbeat_s: float
    ping_s: float = math.inf
    is_logged: bool = False
    sign_s: float = math.inf

    def jittered(self) -> "Pace":
        """Return this pace with the limits for data and bytes up to a fifth shorter.

        So answers that began at the same time do not all write heartbeats at the same time.
        """
        share = random.uniform(0.8, 1.0)
        return self._replace(heartbeat_s=share * self.heartbeat_s, ping_s=share * self.ping_s)


class LiveAnswer:
    """Sends status and headers immediately, then data during the generation.

    Heartbeats are sent in between.
    """

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
        """Create the answer that sends the events after seq `after`.

        `finish` returns the bytes that follow the last event. If at most `num_joined` events
        are waiting, their frames are sent in one message, otherwise each in its own.
        """
        self._headers = headers
        self._finish = finish
        self._num_joined = num_joined
        self._stream = stream
        self._rendering = rendering
        self.pace = pace.jittered()
        self._after = after
        # Loop times at which the last data, the last byte and the last sign of life were sent.
        self._data_at = self._byte_at = self._sign_at = 0.0
        self._writing = asyncio.Lock()
        self._has_ended = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {
            "content-type": self._rendering.media_type,
            "x-stream-id": self._stream.record.id,
            "x-stream-mode": self._stream.record.mode,
            **self._headers,
        }
        # The client is a reader from the start. A stream that never had a reader would also never
        # lose its last reader, and would stay in memory after its end.
        async with self._stream.audience.reader(self._after) as reader:
            await send(live_start(headers))
            await while_connected(receive, self._deliver(send, reader))

    async def _deliver(self, send: Send, reader: Reader) -> None:
        self._data_at = self._byte_at = self._sign_at = asyncio.get_running_loop().time()
        beating = asyncio.create_task(self._beat(send))
        try:
            await self._stream.audience.pause.unless(self._follow(send, reader))
        except Exception as error:
            notice = notice_of(error)
            # If clients count bytes, a byte that is not in the log would shift all later offsets.
            if not self.pace.is_logged:
                await self._write(send, self._rendering.failure(notice), is_last=True)
        finally:
            beating.cancel()
        async with self._writing:
            self._has_ended = True
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _follow(self, send: Send, reader: Reader) -> None:
        """Send the events of the log.

        This method runs for every token. So the method is one loop with three numbered steps, and
        not several short functions.
        """
        log, audience, pace = self._stream.log, self._stream.audience, self.pace
        after, has_ended = self._after, False
        while not has_ended:
            # 1. Wait for events and read all that exist. The events of a few steps are sent
            # together. A longer page is sent event by event, so that other tasks can run in
            # between.
            await log.wait(after)
            page, has_ended = await log.read(after, _PAGE)
            after += len(page)
            is_long = len(page) > self._num_joined
            messages = [[event] for event in page] if is_long else [page]
            for events in messages:
                if is_long and is_old(log, events[0]):
                    await slice_of_loop()
                # 2. Render the events. If one fails, the frames before it are still sent.
                frames, shown, failure = list[bytes](), list[AnyEvent](), None
                try:
                    for event in events:
                        if rendered := self._rendering.render(event):
                            frames += rendered
                            shown.append(event)
                except Exception as error:
                    failure = error
                # 3. Send the frames, and note which events have reached the client. A
                # heartbeat comment from the log is not data, even if the reader's byte offset
                # cuts off its beginning.
                if frames:
                    is_data = not pace.is_logged or any(not PING.endswith(it) for it in frames)
                    is_end = has_ended and events is messages[-1]
                    is_last = is_end and failure is None and self._finish is None
                    await self._write(send, b"".join(frames), is_data, is_last)
                    if has_ended or not audience.has_seen_tokens:
                        for event in shown:
                            reader.sent(event)
                if failure is not None:
                    raise failure
                if pace.sign_s < math.inf and any(map(_is_sign, events)):
                    self._sign_at = asyncio.get_running_loop().time()
        if self._finish is not None:
            await self._write(send, await self._finish(), is_last=True)
            reader.sent(page[-1])

    async def _beat(self, send: Send) -> None:
        """Send a heartbeat whenever a limit of the pace is reached, even while `_follow` waits.

        Three clocks run, one for each limit of the pace. After `sign_s` without a sign of life, a
        heartbeat is appended to the log, and `_follow` sends this heartbeat. After `heartbeat_s`
        without data, a heartbeat is sent as data. After `ping_s` without a byte, a heartbeat is
        sent as a comment. A comment restarts only the clock of `ping_s`.
        """
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
            # While the lock is held, the client has not yet accepted an earlier write.
            if not self._writing.locked():
                interval_s = self.pace.heartbeat_s if is_data else self.pace.ping_s
                # `_follow` reads the heartbeat from the log as an event.
                self._stream.beat(form, interval_s)
            self._byte_at = asyncio.get_running_loop().time()
            if is_data:
                self._data_at = self._byte_at
        else:
            await self._write(send, self._rendering.idle(form), is_data)

    async def _write(
        self, send: Send, frame: bytes, is_data: bool = True, is_last: bool = False
    ) -> None:
        async with self._writing:
            if self._has_ended:
                return
            # A heartbeat that waits for the lock must not follow the last frame.
            self._has_ended = is_last
            await send({"type": "http.response.body", "body": frame, "more_body": True})
            self._byte_at = asyncio.get_running_loop().time()
            if is_data:
                self._data_at = self._byte_at


def deliver(
    stream: Found, config: StreamConfig, headers: Mapping[str, str] = MappingProxyType({})
) -> WholeAnswer | LiveAnswer | AnswerSoFar:
    """Return the answer with these headers, in the format that the request asked for."""
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
    """Return whether every client takes the event's frames as a sign of life."""
    is_beat = isinstance(event, Heartbeat) and event.form == "sign"
    return is_beat or isinstance(event, Accepted | Tokens)


def pace_of(record: Record, config: StreamConfig) -> Pace:
    """Return the pace for a connection that carries the frames of the POST's answer."""
    options = record.request.response_options
    ping_s = options.ping_interval_s or config.sse_ping_interval
    return Pace(
        config.heartbeat_s if options.heartbeat else math.inf,
        ping_s if ping_s > 0 else math.inf,
        is_logged=record.names.conversation is not None,
        sign_s=VISIBLE_SIGN_S.get(record.request.route, math.inf)
        if options.heartbeat
        else math.inf,
    )
