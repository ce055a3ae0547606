"""Answers a request while its model is being downloaded: first headers, then heartbeats."""

import asyncio
import time
from collections.abc import Callable
from typing import NamedTuple

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.gateway.http_responses import live_start, notice_of
from headrace.protocols.dialect import WireFrames, dialect_of
from headrace.streams.record import Names, Record
from headrace_common.errors import RequestError
from headrace_common.ids import StreamId
from headrace_common.request import Request, Route
from headrace_common.sampling import Sampling
from headrace_common.worker_jobs import CheckedBody


class DownloadWait(NamedTuple):
    """Describes the data that a client receives during the download of its model."""

    headers: dict[str, str]
    # The bytes of a heartbeat; empty if the request wants no heartbeats.
    sign: bytes
    # Renders an error as the last frame, if no stream can be opened.
    failure: Callable[[RequestError], bytes]


def download_wait(
    route: Route, checked: CheckedBody, names: Names, stream_id: StreamId, is_loading: bool = True
) -> DownloadWait:
    """Describe the data that a client receives while it waits for a streamed answer.

    If `is_loading` is false, the client waits for the compaction of its conversation.
    """
    headers = {"content-type": dialect_of(route).FRAMING.MEDIA_TYPE}
    if is_loading:
        headers["x-headrace-loading"] = "true"
    if checked.ignored:
        headers["x-headrace-ignored"] = ", ".join(checked.ignored)
    # A client that opted in to resuming would later ask for the stream with this id. But the stream
    # may never exist, so such a client does not get the id here.
    if not names.is_opted_in:
        headers |= {"x-stream-id": stream_id, "x-stream-mode": "fresh"}
    model = checked.fields.get("model", "")
    request = Request(route, model, checked.stubs, Sampling())
    record = Record(stream_id, int(time.time()), request, (), "")
    frames = WireFrames(record)
    is_silent = checked.fields.get("heartbeat") is False
    comment = dialect_of(route).FRAMING.comment("loading the model" if is_loading else "compacting")
    sign = b"" if is_silent else comment + frames.idle()
    return DownloadWait(headers, sign, dialect_of(route).ERRORS.frame)


class WaitingAnswer:
    """Sends headers immediately, then heartbeats, and then the real answer."""

    def __init__(
        self, coming: "asyncio.Task[ASGIApp]", wait: DownloadWait, interval_s: float
    ) -> None:
        self._coming = coming
        self._interval_s = interval_s
        self._wait = wait

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send(live_start(self._wait.headers))
        try:
            while not self._coming.done():
                await _body(send, self._wait.sign, True)
                await asyncio.wait((self._coming,), timeout=self._interval_s)
            try:
                answer = self._coming.result()
            except ClientDisconnect:
                return
            # A client that has received headers must also receive an end after any error.
            except Exception as error:
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
