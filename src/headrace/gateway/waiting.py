"""The answer to a request whose model is still being loaded: headers in time, signs of life."""

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.core.errors import RequestError
from headrace.core.ids import StreamId
from headrace.core.request import Request, Route
from headrace.core.sampling import Sampling
from headrace.gateway.answers import notice_of
from headrace.generation.host import Host
from headrace.protocols.dialect import WireFrames, dialect_of, encode
from headrace.protocols.requests import CheckedBody
from headrace.streams.record import Names, Record

_OBJECT = b'data: {"'  # of the dialects whose chunks have no kind


class Wait(NamedTuple):
    """How a wire hears of a wait."""

    headers: dict[str, str]
    sign: Callable[[], bytes]  # that the server lives
    failure: Callable[[RequestError], bytes]  # the end, if there will be no stream


def wait_of(
    route: Route,
    checked: CheckedBody,
    names: Names,
    stream_id: StreamId,
    host: Host | None,
) -> Wait | None:
    """None where the answer is one body, which nothing precedes.

    `host` is that of the model that is waited for, if it is known.
    """
    if not checked.fields.get("stream"):
        return None
    headers = {
        "content-type": "text/event-stream",
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
    # where readers count bytes, those that no log has would shift the others
    is_silent = names.conversation is not None or checked.fields.get("heartbeat") is False
    asks_for_progress = bool(checked.fields.get("return_progress"))

    def sign() -> bytes:
        share = None if host is None else host.share
        return b"" if is_silent else _sign(frames.idle(), share, asks_for_progress)

    return Wait(headers, sign, dialect_of(request.route).ERRORS.frame)


def _sign(idle: bytes, share: float | None, asks_for_progress: bool) -> bytes:
    """A comment and a heartbeat; with progress asked for, the heartbeat has the share loaded."""
    if share is None:
        return b": loading the model\n" + idle
    if asks_for_progress and idle.startswith(_OBJECT) and idle.endswith(b"}\n\n"):
        told = encode({"loading": {"progress": share}})
        idle = idle.removesuffix(b"}\n\n") + b"," + told[1:] + b"\n\n"
    return f": loading the model, {100 * share:.0f} %\n".encode() + idle


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
                await _body(send, self._wait.sign(), True)
                await asyncio.wait((self._coming,), timeout=self._interval_s)
            answer = self._coming.result()
        except RequestError as error:
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
