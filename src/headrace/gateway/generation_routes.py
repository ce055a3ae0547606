"""The routes that generate: a body becomes a stream, the stream an answer."""

from types import ModuleType

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.core.config import ServerConfig
from headrace.gateway import chat_schema, completions_schema
from headrace.gateway.bodies import decode, read_body
from headrace.gateway.delivery import deliver
from headrace.gateway.door import Door
from headrace.gateway.names import names_of
from headrace.generation.generation import Generation


class GenerationRoutes:
    def __init__(self, generation: Generation, config: ServerConfig, door: Door) -> None:
        self._generation = generation
        self._door = door
        self._config = config

    async def chat(self, request: Request) -> ASGIApp:
        return await self._generate(request, chat_schema)

    async def completions(self, request: Request) -> ASGIApp:
        return await self._generate(request, completions_schema)

    async def _generate(self, request: Request, schema: ModuleType) -> ASGIApp:
        limit = self._config.http.max_body_bytes
        body = await read_body(request.headers, request.receive, limit)
        fields = schema.read(decode(body))
        owner = self._door.owner(request.headers)
        names = names_of(owner, request.headers, request.url.path, body)
        stream = await self._generation.attach(names, fields.get("attach") is not False)
        if stream is not None:
            return Attached(deliver(stream, self._config.streams))
        model = self._generation.models.get(fields.get("model"))
        wanted = schema.to_request(fields, model)
        stream = await self._generation.open(wanted, names)
        answer = deliver(stream, self._config.streams)
        return answer if stream.record.request.wire is wanted.wire else Attached(answer)


class Attached:
    """An answer that says it is not the first to this request."""

    def __init__(self, answer: ASGIApp) -> None:
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Stream-Attached"] = "true"
            await send(message)

        await self._answer(scope, receive, send_marked)
