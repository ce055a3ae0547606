"""The routes that take a body: it becomes a stream, under the names its headers give, or ids."""

from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.core.config import ServerConfig
from headrace.core.errors import RequestError
from headrace.core.request import Route
from headrace.gateway.auth import Auth
from headrace.gateway.bodies import Bodies, HeldAnswer
from headrace.gateway.delivery import deliver, unless_left
from headrace.gateway.responses_routes import EarlierResponses
from headrace.generation.generation import Generation
from headrace.protocols.dialect import dialect_of
from headrace.protocols.requests import CheckedBody, to_request
from headrace.streams.record import Names

T = TypeVar("T")

_decode = msgspec.msgpack.Decoder(CheckedBody).decode


class GenerationRoutes:
    def __init__(
        self, generation: Generation, config: ServerConfig, door: Auth, bodies: Bodies
    ) -> None:
        self._generation = generation
        self._earlier = EarlierResponses(generation, config.http.max_body_bytes)
        self._bodies = bodies
        self._door = door
        self._config = config

    async def generate(self, request: Request) -> ASGIApp:
        """A POST in the dialect of its path."""
        route = request.url.path
        async with self._bodies.read(request) as body:
            reading = self._generation.work.do("read", body, route)
            checked = _decode(await self._finish(request, reading))
        names = names_of(self._door.owner(request.headers), request.headers, checked)
        admitting = self._admit(route, checked, names)
        return await self._finish(request, admitting, names.is_opted_in)

    async def _finish(
        self, request: Request, work: Coroutine[Any, Any, T], is_opted_in: bool = False
    ) -> T:
        """The result of work that outlives its client as a stream would; else ClientDisconnect."""
        is_opted_in = is_opted_in or any(name in request.headers for name in (CONVERSATION, KEY))
        patience_s = None if is_opted_in else self._config.streams.linger_s
        return await unless_left(request.receive, work, patience_s)

    async def _admit(self, route: Route, checked: CheckedBody, names: Names) -> ASGIApp:
        attaches = checked.fields.get("attach") is not False
        stream = await self._generation.attach(names, attaches)
        if stream is not None:
            return Marked(deliver(stream, self._config.streams), checked.ignored, True)
        model = self._generation.models.get(checked.fields.get("model"))
        dialect = dialect_of(route)
        checked = await self._earlier.put_before(checked, names.owner)
        wanted = to_request(dialect, checked, model)
        stream = await self._generation.open(wanted, names, checked.packed, dialect.ID_PREFIX)
        answer = deliver(stream, self._config.streams)
        return Marked(answer, checked.ignored, stream.record.request.wire is not wanted.wire)


class Marked:
    """An answer whose headers say what became of the request.

    `ignored` fields of it have no effect; `is_attached`: the answer is that of an earlier one.
    """

    def __init__(self, answer: ASGIApp, ignored: tuple[str, ...], is_attached: bool) -> None:
        self._answer = answer
        self._headers = {"X-Stream-Attached": "true"} if is_attached else {}
        if ignored:
            self._headers["X-Headrace-Ignored"] = ", ".join(ignored)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(self._headers)
            await send(message)

        await self._answer(scope, receive, send_marked)


CONVERSATION, KEY = "X-Conversation-Id", "Idempotency-Key"
_MAX_CONVERSATION, _MAX_KEY = 512, 255


def names_of(owner: str, headers: Headers, checked: CheckedBody) -> Names:
    """RequestError `invalid_value` for a name that is none."""
    fields = checked.fields
    return Names(
        owner=owner,
        conversation=_name(headers, CONVERSATION, _MAX_CONVERSATION),
        key=_name(headers, KEY, _MAX_KEY),
        digest=checked.digest,
        is_stored=bool(fields.get("store") or fields.get("background")),
        is_kept=bool(checked.kept) and "store" not in fields,
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

    def __init__(self, generation: Generation, bodies: Bodies) -> None:
        self._generation = generation
        self._bodies = bodies

    async def tokenize(self, request: Request) -> ASGIApp:
        model = self._generation.models.get(None)
        return await self._do(request, "tokenize", model.max_model_len)

    async def count_tokens(self, request: Request) -> ASGIApp:
        """How many a conversation would have on /v1/messages."""
        return await self._do(request, "count_tokens")

    async def detokenize(self, request: Request) -> ASGIApp:
        return await self._do(request, "detokenize")

    async def apply_template(self, request: Request) -> ASGIApp:
        return await self._do(request, "apply_template")

    async def _do(self, request: Request, job: str, *arguments: Any) -> ASGIApp:
        async with self._bodies.read(request) as body:
            work = self._generation.work.do(job, body, *arguments)
            result = await unless_left(request.receive, work)
        return HeldAnswer(result, self._bodies)
