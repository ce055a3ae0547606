"""Routes that list, load, unload and download models, in the format of llama.cpp's router."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from headrace.fleet.model_host import ModelHost
from headrace.fleet.pulls import Pull
from headrace.gateway.codex_catalog import catalog
from headrace.gateway.delivery import unless_left
from headrace.gateway.http_responses import answer
from headrace.gateway.model_entries import entry_of
from headrace.gateway.model_events import Statuses, changed
from headrace.gateway.model_view import view_of, views_of
from headrace.gateway.polled_events import PolledState, Watch
from headrace.gateway.request_bodies import Bodies
from headrace.generation.generation import Generation
from headrace.protocols.requests import decode
from headrace_common.checkpoints.catalog import CatalogEntry, usable_bytes
from headrace_common.checkpoints.catalog import catalog as short_names
from headrace_common.errors import RequestError
from headrace_common.system.memory_limits import installed_bytes
from headrace_common.worker_jobs import ReadModelName

_MAX_DOCUMENT = 1 << 20


class ModelRoutes:
    def __init__(self, generation: Generation, bodies: Bodies) -> None:
        self._generation = generation
        self._bodies = bodies
        self._statuses = PolledState(self._read_statuses, changed)

    async def models(self, request: Request) -> ASGIApp:
        """List all models and downloads with their states.

        A server with a single model has this route too.
        """
        await self._generation.desired.reread()
        served = views_of(self._generation.fleet.hosts)
        aliases = [entry_of(one, has_states=True) for one in served if one.id != one.name]
        entries = self._entries() + aliases
        return answer({"object": "list", "data": entries, "models": catalog(served)})

    async def available(self, request: Request) -> ASGIApp:
        """List the models of the catalog, and whether each fits into the usable memory."""
        memory = installed_bytes()
        usable = usable_bytes(memory)
        entries = [catalog_entry(entry, usable) for entry in short_names().values()]
        facts = {"memory_bytes": memory, "usable_bytes": usable}
        return answer({"object": "list", "data": entries, **facts})

    async def events(self, request: Request) -> ASGIApp:
        """Send each change in the list of models as an event."""
        return Watch(self._statuses, b": \n\n")

    def _read_statuses(self) -> Statuses:
        return {it["id"]: it["status"] for it in self._entries()}

    def _entries(self) -> list[dict[str, Any]]:
        pulls = self._generation.desired.pulls
        entries = [
            entry_of(view_of(host, name), has_states=True)
            | self._pending(host)
            | _origin(pulls.find(name))
            for host in self._generation.fleet.roster.all()
            for name in host.names
        ]
        listed = {entry["id"] for entry in entries}
        return entries + [pull_entry(pull) for pull in pulls.all() if pull.model not in listed]

    def _pending(self, host: ModelHost) -> dict[str, str]:
        """Return the pending change of a model. The change is made when the model is not in use."""
        roster = self._generation.fleet.roster
        if host.name in roster.leaving:
            return {"pending": "removal"}
        return {"pending": "reload"} if host.name in roster.changing else {}

    async def desired(self, request: Request) -> ASGIApp:
        """Return the models that the server should have, in the format that PUT accepts."""
        return answer(self._generation.desired.document())

    async def put_desired(self, request: Request) -> ASGIApp:
        """Replace the configured models, or refuse the whole document.

        A model that is in use changes after its streams have ended.
        """
        given = decode(await self._bodies.read_small(request, _MAX_DOCUMENT))
        await self._generation.desired.put(given)
        return answer(self._generation.desired.document())

    async def pull(self, request: Request) -> ASGIApp:
        """Start a download, and answer when the hub has described the model.

        The list of models shows the progress.
        """
        name = await self._name(request)
        await unless_left(request.receive, self._generation.desired.pull(name))
        return answer({"success": True})

    async def delete(self, request: Request) -> ASGIApp:
        """Delete a model or stop its download.

        The answer is sent immediately. The model is deleted after its streams have ended.
        """
        if (name := request.query_params.get("model")) is None:
            message = "Name the model in the query, as ?model=ID."
            raise RequestError("missing_required_parameter", message, "model")
        await self._generation.desired.delete(name)
        return answer({"success": True})

    async def load(self, request: Request) -> ASGIApp:
        """Start loading a model, and answer immediately. The list of models shows the progress."""
        host = self._generation.fleet.hosts.get(await self._name(request))
        self._generation.fleet.need(host)
        return answer({"success": True})

    async def unload(self, request: Request) -> ASGIApp:
        """Unload a model after its streams have ended, or stop its download; answer immediately."""
        name = await self._name(request)
        pull = self._generation.desired.pulls.find(name)
        if pull is not None and pull.state != "here":
            await self._generation.desired.pulls.stop(name)
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


def catalog_entry(entry: CatalogEntry, usable: int) -> dict[str, Any]:
    """Describe a model that can be downloaded, as the list of available models shows it."""
    facts: dict[str, Any] = msgspec.to_builtins(entry)
    facts["id"] = facts.pop("name")
    needed = entry.memory_bytes
    return facts | {"memory_bytes": needed, "fits": needed <= usable}


def pull_entry(pull: Pull) -> dict[str, Any]:
    """Return the list entry of a model that is not downloaded yet."""
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
