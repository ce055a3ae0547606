"""The answer to a request whose model is being downloaded: headers in time, signs of life."""

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.gateway.http_responses import notice_of
from headrace.protocols.dialect import WireFrames, dialect_of
from headrace.streams.record import Names, Record
from headrace_common.errors import RequestError
from headrace_common.ids import StreamId
from headrace_common.jobs import CheckedBody
from headrace_common.request import Request, Route
from headrace_common.sampling import Sampling


class Wait(NamedTuple):
    """How a client hears of a wait."""

    headers: dict[str, str]
    sign: bytes  # that the server lives
    failure: Callable[[RequestError], bytes]  # the end, if there will be no stream


def wait_of(route: Route, checked: CheckedBody, names: Names, stream_id: StreamId) -> Wait | None:
    """The wait that a client hears of; None where the answer is one body."""
    if not checked.fields.get("stream"):
        return None
    headers = {
        "content-type": dialect_of(route).FRAMING.MEDIA_TYPE,
        "cache-control": "no-cache",
        "x-accel-buffering": "no",
        "x-headrace-loading": "true",
    }
    if checked.ignored:
        headers["x-headrace-ignored"] = ", ".join(checked.ignored)
    if not names.is_opted_in:  # else who knows the name would look for what there may never be
        headers |= {"x-stream-id": stream_id, "x-stream-mode": "fresh"}
    model = checked.fields.get("model", "")
    request = Request(route, model, checked.stubs, Sampling())
    record = Record(stream_id, int(time.time()), request, (), "")
    frames = WireFrames(record)
    is_silent = checked.fields.get("heartbeat") is False
    comment = dialect_of(route).FRAMING.comment("loading the model")
    sign = b"" if is_silent else comment + frames.idle()
    return Wait(headers, sign, dialect_of(route).ERRORS.frame)


class WaitingAnswer:
    """Headers at once, signs of life until there is an answer, and then that one."""

    def __init__(self, coming: "asyncio.Task[ASGIApp]", wait: Wait, interval_s: float) -> None:
        self._coming = coming
        self._interval_s = interval_s
        self._wait = wait

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        raw = [(name.encode(), value.encode()) for name, value in self._wait.headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": raw})
        try:
            while not self._coming.done():
                await _body(send, self._wait.sign, True)
                await asyncio.wait((self._coming,), timeout=self._interval_s)
            try:
                answer = self._coming.result()
            except Exception as error:  # whatever it is, a client with headers gets an end
                await _body(send, self._wait.failure(notice_of(error)), False)
                return
        finally:
            self._coming.cancel()

        async def send_body(message: Message) -> None:
            if message["type"] != "http.response.start":
                await send(message)

        await answer(scope, receive, send_body)


async def _body(send: Send, data: bytes, more: bool) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": more})
