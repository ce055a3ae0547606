"""Routes that answer with vectors or scores, and open no stream that a client could resume."""

from starlette.requests import Request
from starlette.types import ASGIApp

from headrace.gateway.auth import Auth
from headrace.gateway.delivery import unless_left
from headrace.gateway.http_responses import answer
from headrace.gateway.request_bodies import Bodies, CountedAnswer
from headrace.generation.generation import Generation
from headrace.intake.intake import Intake
from headrace.intake.vectors import ONE, Requester
from headrace.text.model_names import called
from headrace_common.request import Route
from headrace_common.worker_jobs import CheckedBody, ReadInputs, ReadJob, ReadPairs


class VectorRoutes:
    def __init__(self, generation: Generation, intake: Intake, auth: Auth, bodies: Bodies) -> None:
        self._generation = generation
        self._intake = intake
        self._auth = auth
        self._bodies = bodies

    async def embed(self, request: Request) -> ASGIApp:
        return await self._answer(request, ReadInputs())

    async def embed_bare(self, request: Request) -> ASGIApp:
        """Embed as Ollama's API does, without an object around each vector."""
        return await self._answer(request, ReadInputs(may_be_empty=True))

    async def embed_one(self, request: Request) -> ASGIApp:
        """Embed as Ollama's older API does, with one vector for one `prompt`."""
        return await self._answer(request, ReadInputs(is_prompt=True, may_be_empty=True))

    async def pairs(self, request: Request) -> ASGIApp:
        """Rank documents for a query, or score pairs of texts."""
        return await self._answer(request, ReadPairs(request.url.path))

    async def _answer(self, request: Request, job: ReadJob) -> ASGIApp:
        """Answer a request, or cancel the work if the client leaves."""
        async with self._bodies.read(request) as body:
            reading = self._intake.read(job, body)
            checked = await unless_left(request.receive, reading)
        if checked.fields.get("is_empty"):
            return await unless_left(request.receive, self._load(request.url.path, checked))
        asker = Requester(request.url.path, self._auth.owner(request.headers))
        whole = await unless_left(request.receive, self._intake.vectors.answer(checked, asker))
        return CountedAnswer(whole, self._bodies, checked.ignored)

    async def _load(self, route: Route, checked: CheckedBody) -> ASGIApp:
        """Start loading the model. Ollama's clients send an empty input to load a model."""
        name = checked.fields.get("model")
        host = await self._generation.host_for(name, waits=True)
        self._generation.fleet.need(host)
        if route == ONE:
            return answer({"embedding": []}, checked.ignored)
        model = checked.fields.get("alias") or called(host, name)
        return answer({"model": model, "embeddings": []}, checked.ignored)
