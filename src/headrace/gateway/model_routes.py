"""Routes that list models, and load and unload them, as llama.cpp's router has it."""

from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from headrace.fleet.model_host import ModelHost
from headrace.fleet.model_list import Desired
from headrace.fleet.pulls import Pull
from headrace.gateway.bodies import Bodies
from headrace.gateway.codex_catalog import catalog
from headrace.gateway.delivery import unless_left
from headrace.gateway.http_responses import answer
from headrace.gateway.model_entries import entry_of
from headrace.gateway.model_events import changed
from headrace.gateway.model_view import view_of, views_of
from headrace.gateway.watch import Watch
from headrace.generation.generation import Generation
from headrace.protocols.requests import decode
from headrace_common.errors import RequestError
from headrace_common.jobs import ReadModelName

_MAX_DOCUMENT = 1 << 20


class ModelRoutes:
    def __init__(self, generation: Generation, bodies: Bodies) -> None:
        self._generation = generation
        self._bodies = bodies

    async def models(self, request: Request) -> ASGIApp:
        """Also of a server with one model, with the state of each, and what is downloaded."""
        await self._desired().reread()
        served = views_of(self._generation.fleet.hosts)
        aliases = [entry_of(one, has_states=True) for one in served if one.id != one.name]
        entries = self._entries() + aliases
        return answer({"object": "list", "data": entries, "models": catalog(served)})

    async def events(self, request: Request) -> ASGIApp:
        """Each change of the list, as it happens."""
        return Watch(lambda: {it["id"]: it["status"] for it in self._entries()}, changed, b": \n\n")

    def _entries(self) -> list[dict[str, Any]]:
        pulls = self._desired().pulls
        entries = [
            entry_of(view_of(host, name), has_states=True)
            | self._pending(host)
            | _origin(pulls.find(name))
            for host in self._generation.fleet.roster.all()
            for name in host.names
        ]
        there = {entry["id"] for entry in entries}
        return entries + [pull_entry(pull) for pull in pulls.all() if pull.model not in there]

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
            await self._desired().put(decode(whole))
        return answer(self._desired().document())

    def _desired(self) -> Desired:
        assert self._generation.desired is not None
        return self._generation.desired

    async def pull(self, request: Request) -> ASGIApp:
        """Answers once the hub has; the list of models shows what becomes of it."""
        name = await self._name(request)
        await unless_left(request.receive, self._desired().pull(name))
        return answer({"success": True})

    async def delete(self, request: Request) -> ASGIApp:
        """Answers at once; the model's streams end first."""
        if (name := request.query_params.get("model")) is None:
            raise RequestError("missing_required_parameter", "Say which, as ?model=ID.", "model")
        await self._desired().delete(name)
        return answer({"success": True})

    async def load(self, request: Request) -> ASGIApp:
        """Answers at once; the list of models shows what becomes of it."""
        host = self._generation.fleet.hosts.get(await self._name(request))
        self._generation.fleet.need(host)
        return answer({"success": True})

    async def unload(self, request: Request) -> ASGIApp:
        """Answers at once; streams end first. A download is stopped."""
        name = await self._name(request)
        pull = self._desired().pulls.find(name)
        if pull is not None and pull.state != "here":
            await self._desired().pulls.stop(name)
            return answer({"success": True})
        host = self._generation.fleet.hosts.get(name)
        if host is self._generation.fleet.pinned:
            message = "This server has one model, which stays loaded; stop the server instead."
            raise RequestError("unsupported_operation", message, "model")
        self._generation.fleet.unload(host)
        return answer({"success": True})

    async def _name(self, request: Request) -> str:
        async with self._bodies.read(request) as body:
            naming = self._generation.work.do(ReadModelName(), body)
            return await unless_left(request.receive, naming)


def _origin(pull: Pull | None) -> dict[str, bool]:
    return {} if pull is None else {"pulled": True}


def pull_entry(pull: Pull) -> dict[str, Any]:
    """A model that is not here yet, as the list shows it."""
    entry = {"id": pull.model, "object": "model", "created": 0, "owned_by": "headrace"}
    entry |= {"root": pull.model, "parent": None, "max_model_len": None, "meta": None}
    return entry | {"status": _status(pull), "kind": None, "lane": None, "pulled": True}


def _status(pull: Pull) -> dict[str, Any]:
    known = {"bytes_done": pull.done, "bytes_total": pull.total} if pull.total else {}
    if pull.state == "failed":
        error = pull.error
        told = {"code": error.code, "message": error.message} if error else {}
        return {"value": "unloaded", "failed": True, "exit_code": 1, "error": told, **known}
    if pull.state != "downloading" or not pull.total:
        return {"value": "downloading" if pull.state == "here" else pull.state, **known}
    pace, left = pull.bytes_per_s, pull.seconds_left
    return {
        "value": "downloading",
        "progress": {pull.model: {"done": pull.done, "total": pull.total}},
        **known,
        "bytes_per_s": None if pace is None else round(pace),
        "seconds_left": None if left is None else round(left, 1),
    }
