"""The routes that take a body: it becomes a stream, under the names its headers give, or ids."""

import asyncio
import logging
import secrets
from collections.abc import Mapping
from types import MappingProxyType

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.gateway.auth import Auth
from headrace.gateway.bodies import Bodies, HeldAnswer
from headrace.gateway.delivery import deliver, unless_left
from headrace.gateway.http_responses import IGNORED, answer
from headrace.gateway.named_models import read_named_models
from headrace.gateway.progress_policy import ProgressPolicy, with_progress
from headrace.gateway.responses_routes import EarlierResponses
from headrace.gateway.waiting import Wait, WaitingAnswer, wait_of
from headrace.generation.generation import Generation
from headrace.generation.registry import Found
from headrace.protocols.dialect import Dialect, dialect_of
from headrace.protocols.inserted_texts import client_of
from headrace.protocols.ollama.answers import unloaded
from headrace.protocols.openai import chat as openai_chat
from headrace.protocols.requests import to_request
from headrace.streams.record import Names
from headrace.text.tool_formats.generic import GENERIC
from headrace.workers.job_line import LARGE, Body
from headrace_common.config.settings import ServerConfig
from headrace_common.errors import RequestError
from headrace_common.ids import StreamId
from headrace_common.jobs import (
    ApplyTemplate,
    CheckedBody,
    CountTokens,
    Detokenize,
    Job,
    KnownModel,
    R,
    ReadBody,
    ReadJob,
    Tokenize,
)
from headrace_common.request import Request as GenerationRequest
from headrace_common.request import Route

logger = logging.getLogger(__name__)


_SOON_S = 0.25  # a request that is refused, or attaches, is answered by then


class GenerationRoutes:
    def __init__(
        self, generation: Generation, config: ServerConfig, auth: Auth, bodies: Bodies
    ) -> None:
        self._generation = generation
        self._earlier = EarlierResponses(generation, config.http.max_body_bytes)
        self._bodies = bodies
        self._auth = auth
        self._config = config
        self._progress = ProgressPolicy(config.streams.return_progress_for)
        self._warned: set[str] = set()  # of models, and of texts that clients insert

    async def generate(self, request: Request) -> ASGIApp:
        """A POST in the dialect of its path."""
        route = request.url.path
        async with self._bodies.read(request) as body:
            job = ReadBody(route, client=_client(request.headers, self._config))
            is_named = any(name in request.headers for name in (CONVERSATION, KEY))
            patience_s = None if is_named else self._config.streams.linger_s
            reading = read_body(self._generation, job, body)
            checked = await unless_left(request.receive, reading, patience_s)
        if checked.fields.get("unloads"):
            return self._unload(request, checked)
        names = names_of(self._auth.owner(request.headers), request.headers, checked)
        checked = self._progress.apply(request.headers, checked)
        self._tell_inserted(job.client, checked.inserted)
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
        return Marked(answer(unloaded(name, request.url.path)), ignored, False)

    def _wait(self, route: Route, checked: CheckedBody, names: Names, id: StreamId) -> Wait | None:
        """How the client hears of a download, before which there can be no stream."""
        host = self._generation.fleet.hosts.find(checked.fields.get("model", ""))
        if host is None or host.is_here or names.conversation is not None:
            return None
        return wait_of(route, checked, names, id)

    async def _admit(
        self, route: Route, checked: CheckedBody, names: Names, id: StreamId
    ) -> ASGIApp:
        checked = await self._earlier.resolve(checked, names.owner)
        stream, is_attached = await self.open(route, checked, names, id)
        delivered = deliver(stream, self._config.streams)
        ignored, told = checked.ignored, dict[str, str]()
        if openai_chat.offers_tools(checked.fields):
            tool_format = _tool_format(stream.record.request)
            ignored += ("tools",) if not tool_format else ()
            told = {"X-Headrace-Tools": GENERIC} if tool_format == GENERIC else {}
        if changes := stream.record.changes:
            told["X-Headrace-Messages-Changed"] = ", ".join(changes)
        return Marked(delivered, ignored, is_attached, told)

    async def open(
        self, route: Route, checked: CheckedBody, names: Names, id: StreamId | None = None
    ) -> tuple[Found, bool]:
        """The stream of a request, and whether it is that of an earlier one."""
        stream = await self._generation.streams.find_equal(names)
        if stream is not None:
            return stream, True
        dialect = dialect_of(route)
        id = id or new_id(dialect)
        name = checked.fields.get("model")
        host = await self._generation.host_for(name, waits=names.conversation is None)
        checked = await self._earlier.put_before(checked, names.owner)
        checked = with_progress(checked, host.config.return_progress)
        wanted = to_request(dialect, checked, host.model)
        if openai_chat.offers_tools(checked.fields):
            self._warn_of_tools(host.name, _tool_format(wanted))
        stream = await self._generation.open(wanted, names, checked, id)
        return stream, stream.record.request.response_options is not wanted.response_options

    def _tell_inserted(self, client: str, inserted: Mapping[str, str]) -> None:
        """Once for each text."""
        for name, text in inserted.items():
            if (told := f"{client}: {name}") not in self._warned:
                self._warned.add(told)
                logger.info(
                    "%s: its prompt has %s, %r: left out of it. %s", client, name, text, _WHY
                )

    def _warn_of_tools(self, model: str, tool_format: str) -> None:
        """Once for each model that was not made for what its clients ask."""
        if tool_format not in _TOOLS_APART or model in self._warned:
            return
        self._warned.add(model)
        logger.warning("%s %s", model, _TOOLS_APART[tool_format])


async def read_body(generation: Generation, job: ReadJob, body: Body) -> CheckedBody:
    """Return a body as a worker checked it, and its tokens if it is small and its model loaded.

    Where the body names an alias, it has the name of the model instead: this is the one place at
    which aliases of requests end. The alias is kept for the answer.
    """
    checked = await _checked(generation, job, body)
    if (asked := checked.fields.get("model")) is None:
        return checked
    name: str = await generation.fleet.resolve(asked)
    if name == asked:
        return checked
    fields = {**checked.fields, "model": name, "alias": asked}
    return msgspec.structs.replace(checked, fields=fields)


async def _checked(generation: Generation, job: ReadJob, body: Body) -> CheckedBody:
    await read_named_models(generation, body)
    known = {
        host.name: KnownModel(host.model.number, host.model.max_model_len)
        for host in generation.fleet.hosts.all()
        if host.ready and job.task in host.ready.tasks and sum(map(len, body)) < LARGE
    }
    try:
        return await generation.work.do(msgspec.structs.replace(job, known=known), body)
    except RequestError as error:
        if error.code != "template_failed":
            raise
    return await generation.work.do(job, body)  # the template overruns again where it is its turn


_TOOLS_APART = {
    "": "has no tool format (--tool-format none); tools that clients send have no effect on it, "
    "and X-Headrace-Ignored names them.",
    GENERIC: "has a chat template that knows no tools; a text before the conversation describes "
    "them, in a form that it was not trained on, and X-Headrace-Tools says so.",
}


def _tool_format(request: GenerationRequest) -> str:
    return request.channels.tools if request.channels else ""


_WHY = (
    "It may be another in each request, and every prompt would then be read anew; "
    "--inserted-texts keep leaves it where it is."
)


def _client(headers: Headers, config: ServerConfig) -> str:
    """The client, if it is one whose inserted texts are to be left out."""
    is_kept = config.streams.inserted_texts == "keep"
    return "" if is_kept else client_of(headers.get("user-agent", ""))


def new_id(dialect: Dialect) -> StreamId:
    return StreamId(dialect.ID_PREFIX + secrets.token_hex(16))


class Marked:
    """An answer whose headers say what became of the request.

    `ignored` fields of it have no effect; `is_attached`: the answer is that of an earlier one;
    `told` are further headers.
    """

    def __init__(
        self,
        answer: ASGIApp,
        ignored: tuple[str, ...],
        is_attached: bool,
        told: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._answer = answer
        self._headers = dict(told)
        if is_attached:
            self._headers["X-Stream-Attached"] = "true"
        if ignored:
            self._headers[IGNORED] = ", ".join(ignored)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(self._headers)
            await send(message)

        await self._answer(scope, receive, send_marked)


CONVERSATION, KEY = "X-Conversation-Id", "Idempotency-Key"
_MAX_CONVERSATION, _MAX_KEY = 512, 255


def names_of(owner: str, headers: Headers, checked: CheckedBody) -> Names:
    """RequestError `invalid_value` for a name that is not valid."""
    fields = checked.fields
    return Names(
        owner=owner,
        conversation=_name(headers, CONVERSATION, _MAX_CONVERSATION),
        key=_name(headers, KEY, _MAX_KEY),
        digest=checked.digest,
        is_stored=bool(fields.get("store") or fields.get("background")),
        is_kept=bool(checked.kept) and "store" not in fields,
        can_attach=fields.get("attach") is not False,
    )


def _name(headers: Headers, header: str, longest: int) -> str | None:
    value = headers.get(header)
    if value is None:
        return None
    if not (0 < len(value) <= longest and value.isascii() and value.isprintable()):
        raise RequestError(
            "invalid_value", f"{header} takes 1 to {longest} printable ASCII characters.", header
        )
    return value


class TextRoutes:
    """Text into ids and back without generating; a worker does all of it."""

    def __init__(self, generation: Generation, config: ServerConfig, bodies: Bodies) -> None:
        self._generation = generation
        self._config = config
        self._bodies = bodies

    async def tokenize(self, request: Request) -> ASGIApp:
        hosts = self._generation.fleet.hosts.all()
        longest = {host.name: host.known.max_model_len for host in hosts if host.known}
        return await self._do(request, Tokenize(longest))

    async def count_tokens(self, request: Request) -> ASGIApp:
        """Count the tokens that a conversation would have on /v1/messages."""
        job = CountTokens(_client(request.headers, self._config))
        async with self._bodies.read(request) as body:
            count = await unless_left(request.receive, self._done(job, body))
        return answer({"input_tokens": count.num_tokens}, count.ignored)

    async def detokenize(self, request: Request) -> ASGIApp:
        return await self._do(request, Detokenize())

    async def apply_template(self, request: Request) -> ASGIApp:
        return await self._do(request, ApplyTemplate())

    async def _do(self, request: Request, job: Job[bytes]) -> ASGIApp:
        async with self._bodies.read(request) as body:
            result = await unless_left(request.receive, self._done(job, body))
        return HeldAnswer(result, self._bodies)

    async def _done(self, job: Job[R], body: Body) -> R:
        await read_named_models(self._generation, body)
        return await self._generation.work.do(job, body)
