"""The routes that turn text into ids and back without generating; a worker does all of it."""

from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from headrace.gateway.bodies import Bodies, HeldAnswer
from headrace.gateway.delivery import unless_left
from headrace.generation.generation import Generation


class TextRoutes:
    def __init__(self, generation: Generation, bodies: Bodies) -> None:
        self._generation = generation
        self._bodies = bodies

    async def tokenize(self, request: Request) -> ASGIApp:
        model = self._generation.models.get(None)
        return await self._do(request, "tokenize", model.max_model_len)

    async def detokenize(self, request: Request) -> ASGIApp:
        return await self._do(request, "detokenize")

    async def apply_template(self, request: Request) -> ASGIApp:
        return await self._do(request, "apply_template")

    async def _do(self, request: Request, job: str, *arguments: Any) -> ASGIApp:
        async with self._bodies.read(request) as body:
            work = self._generation.work.do(job, body, *arguments)
            result = await unless_left(request.receive, work)
        return HeldAnswer(result, self._bodies)
