"""Routes that list models, and load and unload them, as llama.cpp's router has it."""

from starlette.requests import Request
from starlette.types import ASGIApp

from headrace.core.errors import RequestError
from headrace.core.jobs import ReadModelName
from headrace.fleet.model_host import ModelHost
from headrace.fleet.model_list import ONE_MODEL, Desired
from headrace.gateway.bodies import Bodies
from headrace.gateway.delivery import unless_left
from headrace.gateway.http_responses import answer
from headrace.gateway.state_routes import entry_of
from headrace.generation.generation import Generation
from headrace.protocols.requests import decode

_MAX_DOCUMENT = 1 << 20


class ModelRoutes:
    def __init__(self, generation: Generation, bodies: Bodies) -> None:
        self._generation = generation
        self._bodies = bodies

    async def models(self, request: Request) -> ASGIApp:
        """Also of a server with one model, with the state of each."""
        fleet = self._generation.fleet
        if self._generation.desired is not None:
            await self._generation.desired.reread(fleet)
        entries = [
            entry_of(host, name, True) | self._pending(host)
            for host in fleet.roster.all()
            for name in host.names
        ]
        return answer({"object": "list", "data": entries})

    def _pending(self, host: ModelHost) -> dict[str, str]:
        """The change that awaits the model until nobody uses it."""
        roster = self._generation.fleet.roster
        if host.name in roster.leaving:
            return {"pending": "removal"}
        return {"pending": "reload"} if host.name in roster.changing() else {}

    async def desired(self, request: Request) -> ASGIApp:
        """The models the server should have, in the form that a PUT takes."""
        return answer(self._desired().document())

    async def put_desired(self, request: Request) -> ASGIApp:
        """Takes the whole document, or nothing of it. Changes follow when streams have ended."""
        async with self._bodies.read(request) as body:
            whole = b"".join(body)
            if len(whole) > _MAX_DOCUMENT:
                message = f"The document has {len(whole)} bytes; {_MAX_DOCUMENT} are taken."
                raise RequestError("request_too_large", message)
            await self._desired().put(decode(whole), self._generation.fleet)
        return answer(self._desired().document())

    def _desired(self) -> Desired:
        if (desired := self._generation.desired) is None:
            raise RequestError("unsupported_operation", ONE_MODEL)
        return desired

    async def load(self, request: Request) -> ASGIApp:
        """Answers at once; the list of models shows what becomes of it."""
        host = self._generation.fleet.hosts.get(await self._name(request))
        self._generation.fleet.need(host)
        return answer({"success": True})

    async def unload(self, request: Request) -> ASGIApp:
        """Answers at once; streams end first."""
        host = self._generation.fleet.hosts.get(await self._name(request))
        if host is self._generation.fleet.pinned:
            message = "This server has one model, which stays loaded; stop the server instead."
            raise RequestError("unsupported_operation", message, "model")
        self._generation.fleet.unload(host)
        return answer({"success": True})

    async def _name(self, request: Request) -> str:
        async with self._bodies.read(request) as body:
            naming = self._generation.work.do(ReadModelName(), body)
            return await unless_left(request.receive, naming)
