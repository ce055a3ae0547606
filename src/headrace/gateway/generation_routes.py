"""The routes that take a body: it becomes a stream, under the names its headers give, or ids."""

import asyncio

from starlette.requests import Request
from starlette.types import ASGIApp

from headrace.gateway.auth import Auth
from headrace.gateway.bodies import Bodies, HeldAnswer
from headrace.gateway.delivery import deliver, unless_left
from headrace.gateway.http_responses import IGNORED, answer
from headrace.gateway.waiting import Wait, WaitingAnswer, wait_of
from headrace.generation.generation import Generation
from headrace.intake.intake import CONVERSATION, KEY, Intake, names_of, new_id
from headrace.protocols.dialect import dialect_of
from headrace.protocols.ollama.answers import unloaded
from headrace.streams.record import Names
from headrace.text.tool_formats.generic import GENERIC
from headrace_common.config.settings import ServerConfig
from headrace_common.ids import StreamId
from headrace_common.jobs import (
    ApplyTemplate,
    CheckedBody,
    CountTokens,
    Detokenize,
    Job,
    Tokenize,
)
from headrace_common.request import Route

_SOON_S = 0.25  # a request that is refused, or attaches, is answered by then


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

    async def generate(self, request: Request) -> ASGIApp:
        """A POST in the dialect of its path."""
        route = request.url.path
        async with self._bodies.read(request) as body:
            is_named = any(name in request.headers for name in (CONVERSATION, KEY))
            patience_s = None if is_named else self._config.streams.linger_s
            agent = request.headers.get("user-agent", "")
            reading = self._intake.read_from(agent, route, body)
            checked = await unless_left(request.receive, reading, patience_s)
        if checked.fields.get("unloads"):
            return self._unload(request, checked)
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

    def _unload(self, request: Request, checked: CheckedBody) -> ASGIApp:
        """Send out a model that Ollama's client needs no more; a server's only model stays."""
        name, ignored = checked.fields["model"], checked.ignored
        fleet = self._generation.fleet
        host = fleet.hosts.get(name)
        if host is fleet.pinned:
            ignored += ("keep_alive",)
        else:
            self._auth.check_operator(request.headers)
            fleet.unload(host)
        return answer(unloaded(name, request.url.path), ignored)

    def _wait(self, route: Route, checked: CheckedBody, names: Names, id: StreamId) -> Wait | None:
        """How the client hears of a download, before which there can be no stream."""
        host = self._generation.fleet.hosts.find(checked.fields.get("model", ""))
        if host is None or host.is_here or names.conversation is not None:
            return None
        return wait_of(route, checked, names, id)

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
    """Text into ids and back without generating; a worker does all of it."""

    def __init__(self, generation: Generation, intake: Intake, bodies: Bodies) -> None:
        self._generation = generation
        self._intake = intake
        self._bodies = bodies

    async def tokenize(self, request: Request) -> ASGIApp:
        hosts = self._generation.fleet.hosts.all()
        longest = {host.name: host.known.max_model_len for host in hosts if host.known}
        return await self._do(request, Tokenize(longest))

    async def count_tokens(self, request: Request) -> ASGIApp:
        """Count the tokens that a conversation would have on /v1/messages."""
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
        return HeldAnswer(result, self._bodies)
