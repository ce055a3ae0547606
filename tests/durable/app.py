"""A server for writes of Durable Streams to our store, for the protocol's own tests.

    python -m tests.durable.app PORT

Each message is one event, whose text has the message's bytes. Reads use the server's own code.
"""

import asyncio
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from headrace.gateway import durable_routes
from headrace.gateway.durable_routes import DurableRead, answer_read, write_offset
from headrace.gateway.http_responses import ErrorBoundary
from headrace.gateway.middleware import cross_origin
from headrace.generation.registry import FinishedStream
from headrace.metrics.metrics import Metrics
from headrace.metrics.traces import NoTraces
from headrace.streams.events import AnyEvent, Tokens
from headrace.streams.log import Log
from headrace.streams.stores.sqlite import SqliteStore
from headrace_common.errors import RequestError
from headrace_common.pieces import ChannelPiece
from tools.harness.stream_events import finish, make_record

_SEQ = "stream-seq"


@dataclass
class Written:
    """A stream and its state; the lock `appending` serializes its writers."""

    found: FinishedStream
    media_type: str
    last_seq: str = ""
    is_closed: bool = False

    def __post_init__(self) -> None:
        self.appending = asyncio.Lock()

    @property
    def log(self) -> Log:
        return self.found.log

    @property
    def kind(self) -> str:
        return self.media_type.partition(";")[0].strip().lower()

    def of(self, event: AnyEvent) -> list[bytes]:
        return [event.text.encode("latin-1")] if isinstance(event, Tokens) else []


class WriteSide:
    def __init__(self, store: SqliteStore) -> None:
        self._store = store
        self._streams: dict[str, Written] = {}
        self._num_made = 0

    async def answer(self, request: Request) -> ASGIApp:
        handle = {"PUT": self._put, "POST": self._post, "DELETE": self._delete}
        return await handle.get(request.method, self._get)(request)

    def _find(self, request: Request) -> Written:
        if (stream := self._streams.get(request.url.path)) is None:
            raise RequestError("stream_not_found", "There is no such stream.")
        return stream

    async def _get(self, request: Request) -> ASGIApp:
        stream = self._find(request)
        return await answer_read(request, DurableRead.read(request), stream.found, stream, 1.0)

    async def _put(self, request: Request) -> ASGIApp:
        path, body = request.url.path, await request.body()
        media_type = request.headers.get("content-type", "application/octet-stream")
        closes = request.headers.get("stream-closed") == "true"
        if (old := self._streams.get(path)) is not None:
            is_same = old.kind == _kind(media_type) and closes == old.is_closed
            return _said(200 if is_same else 409, old)
        self._num_made += 1
        stored = await self._store.create(make_record(f"{path}-{self._num_made}", key=None))
        stream = Written(FinishedStream(stored.record, stored.log), media_type)
        self._streams[path] = stream
        parts = _parts(stream, body) if body else []
        await self._append(stream, parts, closes)
        return _said(201, stream, {"Location": str(request.url)})

    async def _post(self, request: Request) -> ASGIApp:
        stream, body = self._find(request), await request.body()
        closes = request.headers.get("stream-closed") == "true"
        if not body and closes:
            async with stream.appending:
                await self._append(stream, [], closes)
            return _said(204, stream)
        media_type = request.headers.get("content-type", "")
        if not body or not media_type:
            return Response(status_code=400)
        async with stream.appending:
            seq = request.headers.get(_SEQ, "")
            is_late = seq != "" and seq <= stream.last_seq
            if stream.is_closed or is_late or _kind(media_type) != stream.kind:
                return _said(409, stream)
            if not (parts := _parts(stream, body)):
                return Response(status_code=400)
            stream.last_seq = seq or stream.last_seq
            await self._append(stream, parts, closes)
        return _said(204, stream)

    async def _append(self, stream: Written, parts: Sequence[bytes], closes: bool) -> None:
        first = stream.log.next_seq
        events: list[AnyEvent] = [
            Tokens(seq=n, at_ms=n, choice=0, pieces=(ChannelPiece(part.decode("latin-1")),))
            for n, part in enumerate(parts, first)
        ]
        if closes and not stream.is_closed:
            events.append(finish(first + len(events)))
            stream.is_closed = True
        if events:
            await stream.log.append(first, events)

    async def _delete(self, request: Request) -> ASGIApp:
        stream = self._find(request)
        del self._streams[request.url.path]
        await self._store.forget(stream.found.record.id)
        return Response(status_code=204)


def _kind(media_type: str) -> str:
    return media_type.partition(";")[0].strip().lower()


def _parts(stream: Written, body: bytes) -> list[bytes]:
    """Return the messages of an append: the elements of a JSON array, or else the whole body."""
    if stream.kind != "application/json":
        return [body]
    try:
        msgspec.json.decode(body)
    except msgspec.DecodeError:
        raise RequestError("invalid_json", "The body is not JSON.") from None
    if not body.lstrip().startswith(b"["):
        return [body.strip()]
    return [bytes(part) for part in msgspec.json.decode(body, type=list[msgspec.Raw])]


def _said(status: int, stream: Written, more: dict[str, str] | None = None) -> Response:
    headers = {
        "Stream-Next-Offset": write_offset(stream.log.next_seq),
        "Content-Type": stream.media_type,
    }
    if stream.is_closed:
        headers["Stream-Closed"] = "true"
    return Response(status_code=status, headers=headers | (more or {}))


async def serve(port: int) -> None:
    durable_routes.LONG_POLL_S = 2.0  # short, since the tests wait for its end
    with tempfile.TemporaryDirectory() as directory:
        store = SqliteStore.open(Path(directory))
        writes = WriteSide(store)
        methods = ["GET", "HEAD", "PUT", "POST", "DELETE"]
        app = Starlette(
            routes=[Route("/v1/stream/{path:path}", writes.answer, methods=methods)],
            middleware=[
                *cross_origin(("*",)),
                Middleware(ErrorBoundary, figures=Metrics().server, traces=NoTraces()),
            ],
        )
        config = uvicorn.Config(app, port=port, log_level="warning", access_log=False)
        try:
            await uvicorn.Server(config).serve()
        finally:
            await store.close()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
