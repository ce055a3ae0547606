"""llama.cpp's routes for streams: send the body of a POST's answer, starting at any byte."""

import asyncio
import contextlib
import re
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from headrace.gateway.auth import Auth
from headrace.gateway.body_index import BodyIndex
from headrace.gateway.delivery import LiveAnswer, pace_of, unless_left
from headrace.gateway.http_responses import retry_headers
from headrace.gateway.request_bodies import Bodies
from headrace.generation.generation import Generation
from headrace.generation.registry import Found
from headrace.protocols.dialect import WireFrames, encode
from headrace.streams.events import AnyEvent, is_terminal
from headrace.streams.log import Log, LogGone, LogUnsound
from headrace.streams.store import ByConversation
from headrace_common.config.settings import ServerConfig
from headrace_common.errors import RequestError
from headrace_common.worker_jobs import ReadNames

_OFFSET = re.compile(r"[0-9]{1,15}")
_MAX_LOOKUP = 1000


class ByteRoutes:
    def __init__(
        self,
        generation: Generation,
        config: ServerConfig,
        auth: Auth,
        bodies: Bodies,
        index: BodyIndex,
    ) -> None:
        self._work = generation.work
        self._bodies = bodies
        self._index = index
        self._streams = generation.streams
        self._config = config
        self._auth = auth

    async def read(self, request: Request) -> ASGIApp:
        """Send the bytes from offset `from`, and continue with new bytes until the stream ends."""
        conversation = _conversation(request)
        if not conversation:
            return _refuse(400, "Missing conversation id in path")
        try:
            return await self._read(request, conversation)
        except LogUnsound as unsound:
            return _refuse(unsound.kind.status, unsound.message, unsound.code)

    async def _read(self, request: Request, conversation: str) -> ASGIApp:
        owner = self._auth.owner(request.headers)
        found = await self._streams.find(owner, ByConversation(owner, conversation))
        pinned = request.query_params.get("stream_id")
        if found is None or pinned not in (None, found.record.id):
            return _refuse(404, "Stream not found or expired", "not_found_error")
        offsets = request.query_params.getlist("from") or ["0"]
        offset = offsets[0] or "0"
        if len(offsets) > 1 or not _OFFSET.fullmatch(offset):
            return _refuse(400, "Invalid 'from' offset")
        total = await unless_left(request.receive, self._index.num_bytes(found))
        if int(offset) > total:
            message = f"Offset {offset} is beyond the {total} bytes of the stream"
            return _refuse(416, message, "offset_beyond_end", total_bytes=total)
        view = ByteView(found, int(offset))
        return LiveAnswer(found, view, pace_of(found.record, self._config.streams))

    async def delete(self, request: Request) -> ASGIApp:
        """Stop and delete a stream; an unknown stream counts as deleted."""
        conversation = _conversation(request)
        if not conversation:
            return _refuse(400, "Missing conversation id in path")
        owner = self._auth.owner(request.headers)
        await self._streams.discard(owner, ByConversation(owner, conversation))
        return Response(status_code=204)

    async def lookup(self, request: Request) -> ASGIApp:
        """List the streams of the conversations in the body, with the state of each stream."""
        try:
            async with self._bodies.read(request) as body:
                names = await unless_left(request.receive, self._work.do(ReadNames(), body))
        except RequestError as error:
            response = _refuse(error.kind.status, error.message)
            response.headers.update(retry_headers(error))
            return response
        return await self._listed(request, names)

    async def find(self, request: Request) -> ASGIApp:
        """List the streams of the conversations in the query parameter `conversation_id`."""
        names = request.query_params.getlist("conversation_id")
        if not any(names):
            return _refuse(400, "Name a conversation: /v1/streams?conversation_id=ID")
        return await self._listed(request, names)

    async def _listed(self, request: Request, names: Sequence[str]) -> ASGIApp:
        if len(names) > _MAX_LOOKUP:
            return _refuse(400, f"A lookup can have at most {_MAX_LOOKUP} conversation ids")
        owner = self._auth.owner(request.headers)
        return _json(await unless_left(request.receive, self._entries(owner, names)))

    async def _entries(self, owner: str, names: Sequence[str]) -> list[dict[str, Any]]:
        found = await self._streams.find_conversations(owner, names)
        entries = []
        for stream in found:
            # Reading a log in memory never waits, so this call lets other tasks run.
            await asyncio.sleep(0)
            entries.append(await _entry(stream, self._index))
        return [entry for entry in entries if entry]


class ByteView(WireFrames):
    """Renders the body of the POST's answer without its first `num_skipped` bytes."""

    def __init__(self, found: Found, num_skipped: int) -> None:
        super().__init__(found.record)
        self._to_skip = num_skipped

    def render(self, event: AnyEvent) -> list[bytes]:
        return [rest for frame in super().render(event) if (rest := self._cut(frame))]

    def _cut(self, frame: bytes) -> bytes:
        skipped = min(self._to_skip, len(frame))
        self._to_skip -= skipped
        return frame[skipped:]


def _conversation(request: Request) -> str:
    name: str = request.path_params.get("id") or request.query_params.get("conv_id") or ""
    return name


async def _entry(found: Found, index: BodyIndex) -> dict[str, Any] | None:
    """Describe a stream; return None if the log is damaged or was just deleted."""
    record, log = found.record, found.log
    try:
        ended_at = await _ended_at(record.created, log)
        total_bytes = await index.num_bytes(found)
    except (LogGone, LogUnsound):
        return None
    return {
        "conversation_id": record.names.conversation,
        "is_done": ended_at > 0,
        "total_bytes": total_bytes,
        "started_at": record.created,
        "completed_at": ended_at,
        "dropped_prefix": 0,
        "stream_id": record.id,
        "mode": record.mode,
    }


async def _ended_at(created: int, log: Log) -> int:
    """Return the stream's end in Unix seconds; 0 while the stream is running."""
    with contextlib.suppress(IndexError):
        last = (await log.read(log.next_seq - 2, 1))[0][0]
        if is_terminal(last):
            return created + last.at_ms // 1000
    return 0


def _refuse(
    status: int, message: str, kind: str = "invalid_request_error", **more: int
) -> Response:
    error = {"code": status, "message": message, "type": kind} | more
    return _json({"error": error}, status)


def _json(body: object, status: int = 200) -> Response:
    return Response(encode(body), status, media_type="application/json")
