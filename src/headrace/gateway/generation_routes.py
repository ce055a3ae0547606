"""Routes that open a stream from a request body, and routes that convert text and token ids."""

import asyncio
from collections.abc import Callable

from starlette.requests import Request
from starlette.types import ASGIApp

from headrace.gateway.auth import Auth
from headrace.gateway.delivery import deliver, unless_left
from headrace.gateway.download_wait import DownloadWait, WaitingAnswer, download_wait
from headrace.gateway.http_responses import IGNORED, answer
from headrace.gateway.request_bodies import Bodies, CountedAnswer
from headrace.generation.generation import Generation
from headrace.intake.intake import CONVERSATION, KEY, Intake, names_of, new_id
from headrace.protocols.dialect import dialect_of
from headrace.streams.record import Names
from headrace.text.tool_formats.generic import GENERIC
from headrace_common.config.settings import ServerConfig
from headrace_common.ids import StreamId
from headrace_common.request import Route
from headrace_common.worker_jobs import (
    ApplyTemplate,
    CheckedBody,
    CountTokens,
    Detokenize,
    Job,
    Tokenize,
)

# Seconds to wait for the stream before the headers are sent. If the stream is open by then, the
# headers contain the stream's id, even if the stream belongs to an earlier request. A request
# that is refused by then gets the status of the error.
_SOON_S = 0.25

Before = Callable[[Request, CheckedBody], ASGIApp | None]
"""Answers a checked body that should not open a stream; returns None for all other bodies."""


class GenerationRoutes:
    def __init__(
        self,
        generation: Generation,
        intake: Intake,
        config: ServerConfig,
        auth: Auth,
        bodies: Bodies,
    ) -> None:
        self._generation = generation
        self._intake = intake
        self._bodies = bodies
        self._auth = auth
        self._config = config

    async def generate(self, request: Request, before: Before | None = None) -> ASGIApp:
        """Answer a POST in the dialect of its path, unless `before` returns another answer."""
        route = request.url.path
        async with self._bodies.read(request) as body:
            is_named = CONVERSATION in request.headers or KEY in request.headers
            patience_s = None if is_named else self._config.streams.linger_s
            agent = request.headers.get("user-agent", "")
            reading = self._intake.read_from(agent, route, body)
            checked = await unless_left(request.receive, reading, patience_s)
        checked = self._auth.limit_priority(request.headers, checked)
        if before is not None and (other := before(request, checked)) is not None:
            return other
        conversation, key = map(request.headers.get, (CONVERSATION, KEY))
        names = names_of(self._auth.owner(request.headers), checked, conversation, key)
        id = new_id(dialect_of(route))
        wait = self._wait(route, checked, names, id)
        patience_s = names.outlives_client_s(self._config.streams.linger_s)
        admission = self._admit(route, checked, names, id)
        admitting = unless_left(request.receive, admission, patience_s)
        if wait is None:
            return await admitting
        coming = asyncio.create_task(admitting)
        try:
            done, _ = await asyncio.wait((coming,), timeout=_SOON_S)
        except BaseException:
            coming.cancel()
            raise
        if done:
            return coming.result()
        return WaitingAnswer(coming, wait, self._config.streams.heartbeat_s)

    def _wait(
        self, route: Route, checked: CheckedBody, names: Names, id: StreamId
    ) -> DownloadWait | None:
        """Describe the data that the client receives until the stream can be opened.

        First, the model may have to be downloaded, or the conversation may have to be compacted.
        Returns None if neither is necessary, or if the answer is not a stream.
        """
        fields = checked.fields
        is_by_byte = names.conversation is not None and not names.is_in_conversation
        if not fields.get("stream") or is_by_byte:
            return None
        host = self._generation.fleet.hosts.find(fields.get("model", ""))
        if host is None:
            return None
        can_compact = "is_compaction" in fields or fields.get("context_management") is not None
        if host.is_here and not can_compact:
            return None
        return download_wait(route, checked, names, id, is_loading=not host.is_here)

    async def _admit(
        self, route: Route, checked: CheckedBody, names: Names, id: StreamId
    ) -> ASGIApp:
        opened = await self._intake.open(route, checked, names, id)
        headers = dict[str, str]()
        if opened.tool_format == GENERIC:
            headers["X-Headrace-Tools"] = GENERIC
        if changes := opened.stream.record.changes:
            headers["X-Headrace-Messages-Changed"] = ", ".join(changes)
        if opened.is_attached:
            headers["X-Stream-Attached"] = "true"
        if opened.ignored:
            headers[IGNORED] = ", ".join(opened.ignored)
        return deliver(opened.stream, self._config.streams, headers)


class TextRoutes:
    """Converts between text and token ids without generating. A worker process does the work."""

    def __init__(self, generation: Generation, intake: Intake, bodies: Bodies) -> None:
        self._generation = generation
        self._intake = intake
        self._bodies = bodies

    async def tokenize(self, request: Request) -> ASGIApp:
        hosts = self._generation.fleet.hosts.all()
        longest = {host.name: host.known.max_model_len for host in hosts if host.known}
        return await self._do(request, Tokenize(longest))

    async def count_tokens(self, request: Request) -> ASGIApp:
        """Count the prompt tokens that a conversation has on /v1/messages."""
        job = CountTokens(self._intake.client_of(request.headers.get("user-agent", "")))
        async with self._bodies.read(request) as body:
            count = await unless_left(request.receive, self._intake.do(job, body))
        return answer({"input_tokens": count.num_tokens}, count.ignored)

    async def detokenize(self, request: Request) -> ASGIApp:
        return await self._do(request, Detokenize())

    async def apply_template(self, request: Request) -> ASGIApp:
        return await self._do(request, ApplyTemplate())

    async def _do(self, request: Request, job: Job[bytes]) -> ASGIApp:
        async with self._bodies.read(request) as body:
            result = await unless_left(request.receive, self._intake.do(job, body))
        return CountedAnswer(result, self._bodies)
