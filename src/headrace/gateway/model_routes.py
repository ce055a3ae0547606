"""Which models there are, and in and out of memory with them, as llama.cpp's router has it."""

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from headrace.core.errors import RequestError
from headrace.gateway.answers import answer
from headrace.gateway.bodies import Bodies
from headrace.gateway.delivery import unless_left
from headrace.gateway.state_routes import entry_of
from headrace.generation.generation import Generation

_names_of = msgspec.msgpack.Decoder(list[str]).decode


class ModelRoutes:
    def __init__(self, generation: Generation, bodies: Bodies) -> None:
        self._generation = generation
        self._bodies = bodies

    async def models(self, request: Request) -> ASGIApp:
        """Also of a server with one model, with the state of each."""
        hosts = self._generation.hosts.all()
        entries = [entry_of(host, name, True) for host in hosts for name in host.names]
        return answer({"object": "list", "data": entries})

    async def load(self, request: Request) -> ASGIApp:
        """Answers at once; the list of models shows what becomes of it."""
        host = self._generation.hosts.get(await self._name(request))
        self._generation.fleet.need(host)
        return answer({"success": True})

    async def unload(self, request: Request) -> ASGIApp:
        """Answers at once; streams end first."""
        host = self._generation.hosts.get(await self._name(request))
        if self._generation.fleet.is_sole:
            message = "This server has one model, which stays loaded; stop the server instead."
            raise RequestError("unsupported_operation", message, "model")
        self._generation.fleet.unload(host)
        return answer({"success": True})

    async def _name(self, request: Request) -> str:
        async with self._bodies.read(request) as body:
            naming = self._generation.work.do("model_name", body)
            (name,) = _names_of(await unless_left(request.receive, naming))
        return name
