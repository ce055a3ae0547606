"""The routes that generate: a body becomes a stream, the stream an answer."""

from types import ModuleType

from starlette.requests import Request
from starlette.types import ASGIApp

from headrace.core.config import ServerConfig
from headrace.gateway import chat_schema, completions_schema
from headrace.gateway.bodies import read_json
from headrace.gateway.delivery import deliver
from headrace.generation.generation import Generation


class GenerationRoutes:
    def __init__(self, generation: Generation, config: ServerConfig) -> None:
        self._generation = generation
        self._config = config

    async def chat(self, request: Request) -> ASGIApp:
        return await self._generate(request, chat_schema)

    async def completions(self, request: Request) -> ASGIApp:
        return await self._generate(request, completions_schema)

    async def _generate(self, request: Request, schema: ModuleType) -> ASGIApp:
        limit = self._config.http.max_body_bytes
        fields = schema.read(await read_json(request.headers, request.receive, limit))
        model = self._generation.models.get(fields.get("model"))
        stream = await self._generation.open(schema.to_request(fields, model))
        return deliver(stream, self._config.streams)
