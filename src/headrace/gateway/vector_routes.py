"""The routes that answer with vectors or scores: no stream, and nobody to come back to one."""

from starlette.requests import Request
from starlette.types import ASGIApp

from headrace.gateway.auth import Auth
from headrace.gateway.bodies import Bodies, HeldAnswer
from headrace.gateway.delivery import unless_left
from headrace.gateway.http_responses import answer
from headrace.generation.generation import Generation
from headrace.intake.intake import Intake
from headrace.intake.vectors import ONE, Asker
from headrace.text.model_names import called
from headrace_common.jobs import CheckedBody, ReadInputs, ReadJob, ReadPairs
from headrace_common.request import Route


class VectorRoutes:
    def __init__(self, generation: Generation, intake: Intake, auth: Auth, bodies: Bodies) -> None:
        self._generation = generation
        self._intake = intake
        self._auth = auth
        self._bodies = bodies

    async def embed(self, request: Request) -> ASGIApp:
        return await self._answer(request, ReadInputs())

    async def embed_bare(self, request: Request) -> ASGIApp:
        """As Ollama's API has it: vectors without an object around each."""
        return await self._answer(request, ReadInputs(may_be_empty=True))

    async def embed_one(self, request: Request) -> ASGIApp:
        """As Ollama's older API has it: one `prompt`, one vector."""
        return await self._answer(request, ReadInputs(is_prompt=True, may_be_empty=True))

    async def rerank(self, request: Request) -> ASGIApp:
        return await self._answer(request, ReadPairs())

    async def _answer(self, request: Request, job: ReadJob) -> ASGIApp:
        """The work ends with its client."""
        async with self._bodies.read(request) as body:
            reading = self._intake.read(job, body)
            checked = await unless_left(request.receive, reading)
        if checked.fields.get("is_empty"):
            return await unless_left(request.receive, self._load(request.url.path, checked))
        asker = Asker(request.url.path, self._auth.owner(request.headers))
        whole = await unless_left(request.receive, self._intake.vectors.answer(checked, asker))
        return HeldAnswer(whole, self._bodies, checked.ignored)

    async def _load(self, route: Route, checked: CheckedBody) -> ASGIApp:
        """Start to load the model: Ollama's clients ask for that with an empty input."""
        name = checked.fields.get("model")
        host = await self._generation.host_for(name, waits=True)
        self._generation.fleet.need(host)
        if route == ONE:
            return answer({"embedding": []}, checked.ignored)
        model = checked.fields.get("alias") or called(host, name)
        return answer({"model": model, "embeddings": []}, checked.ignored)
