"""Routes of Ollama's API that generate, and that list, download and delete models."""

import asyncio
import hashlib
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.fleet.model_host import ModelHost
from headrace.fleet.pulls import Pull
from headrace.fleet.served_model import ServedModel
from headrace.gateway.auth import Auth
from headrace.gateway.delivery import unless_left, while_connected
from headrace.gateway.generation_routes import GenerationRoutes
from headrace.gateway.http_responses import answer, live_start
from headrace.gateway.llama_routes import read_known
from headrace.gateway.model_entries import family_of, precision_of, utc, width_of
from headrace.gateway.model_view import LOADED, ModelView, view_of, views_of
from headrace.gateway.request_bodies import Bodies
from headrace.generation.generation import Generation
from headrace.protocols.dialect import encode
from headrace.protocols.fields.kinds import Flag, Kind, String, missing, read_fields
from headrace.protocols.framing import LINES
from headrace.protocols.ollama.answers import ERRORS, unloaded
from headrace.protocols.requests import decode
from headrace.text.model_names import Models
from headrace_common.errors import RequestError
from headrace_common.version import __version__
from headrace_common.worker_jobs import CheckedBody, ReadModelName

_API_VERSION = "0.12.6"
"""The version of Ollama's API that these routes implement.

VS Code and Raycast need at least 0.6.4.
"""


_NEVER = "9999-12-31T23:59:59Z"
_MAX_BODY = 1 << 16
_INTERVAL_S = 0.25
# Ollama's clients put these prefixes before the ids of models that come from Hugging Face.
_HUBS = ("hf.co/", "huggingface.co/")

# Clients send one of these fields; the other field can be missing or empty.
NAME_FIELDS: Mapping[str, Kind] = {"model": String(), "name": String()}
PULL_FIELDS: Mapping[str, Kind] = {**NAME_FIELDS, "stream": Flag(), "insecure": Flag()}


class OllamaRoutes:
    def __init__(
        self,
        generation: Generation,
        generation_routes: GenerationRoutes,
        auth: Auth,
        bodies: Bodies,
    ) -> None:
        self._generation = generation
        self._generation_routes = generation_routes
        self._auth = auth
        self._bodies = bodies

    async def generate(self, request: Request) -> ASGIApp:
        """Answer a prompt or a conversation, or unload a model if the body asks for an unload."""
        return await self._generation_routes.generate(request, self._unload)

    def _unload(self, request: Request, checked: CheckedBody) -> ASGIApp | None:
        """Unload the model if the body asks for an unload. A server's only model stays loaded."""
        if not checked.fields.get("unloads"):
            return None
        name, ignored = checked.fields["model"], checked.ignored
        fleet = self._generation.fleet
        host = fleet.hosts.get(name)
        if host is fleet.pinned:
            ignored += ("keep_alive",)
        else:
            self._auth.check_operator(request.headers)
            fleet.unload(host)
        return answer(unloaded(name, request.url.path), ignored)

    async def version(self, request: Request) -> ASGIApp:
        """Answer with the API's version. Clients refuse a server with too old a version."""
        return answer({"version": _API_VERSION, "headrace": __version__})

    async def tags(self, request: Request) -> ASGIApp:
        return answer({"models": [_entry(view) for view in views_of(self._hosts)]})

    async def running(self, request: Request) -> ASGIApp:
        """List the models in memory.

        No model is unloaded at a set time, so each entry has a time in the far future.
        """
        views = [view_of(host, host.name) for host in self._hosts.all()]
        loaded = [view for view in views if view.state in LOADED and view.ready]
        return answer({"models": [_entry(view) | _memory_fields(view) for view in loaded]})

    async def show(self, request: Request) -> ASGIApp:
        async with self._bodies.read(request) as body:
            naming = self._generation.work.do(ReadModelName(), body)
            name = await unless_left(request.receive, naming)
        host = self._hosts.get(name)
        if host.known is None:
            await unless_left(request.receive, read_known(host))
        return answer(_described(view_of(host, name if name in host.names else host.name)))

    async def pull(self, request: Request) -> ASGIApp:
        """Download a model from the hub. The download continues if the client leaves."""
        fields = await self._read(request, PULL_FIELDS)
        pulling = self._generation.desired.pull(_model_of(fields))
        pull = await unless_left(request.receive, pulling)
        if fields.get("stream", True):
            return PullLines(pull)
        if pull is not None:
            await unless_left(request.receive, pull.over.wait())
            if (error := _error_of(pull)) is not None:
                raise error
        return answer({"status": "success"})

    async def delete(self, request: Request) -> ASGIApp:
        await self._generation.desired.delete(_model_of(await self._read(request, NAME_FIELDS)))
        return Response()

    async def _read(self, request: Request, table: Mapping[str, Kind]) -> dict[str, Any]:
        return read_fields(table, decode(await self._bodies.read_small(request, _MAX_BODY)))

    @property
    def _hosts(self) -> Models[ModelHost]:
        return self._generation.fleet.hosts


def _model_of(fields: dict[str, Any]) -> str:
    name = fields.get("model") or fields.get("name")
    if not name:
        raise missing("model")
    for prefix in _HUBS:
        name = name.removeprefix(prefix)
    return str(name).removesuffix(":latest")


class PullLines:
    """Sends the progress of a download as JSON lines, in Ollama's format.

    `pull` is None if the model is already on this machine.
    """

    def __init__(self, pull: Pull | None) -> None:
        self._pull = pull

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send(live_start({"content-type": LINES.MEDIA_TYPE}))
        await while_connected(receive, self._show(send))

    async def _show(self, send: Send) -> None:
        async def send_line(**line: Any) -> None:
            body = encode(line) + b"\n"
            await send({"type": "http.response.body", "body": body, "more_body": True})

        await send_line(status="pulling manifest")
        if (pull := self._pull) is not None:
            digest = hashlib.sha256(pull.model.encode()).hexdigest()
            figures = {"status": f"pulling {digest[:12]}", "digest": f"sha256:{digest}"}
            num_sent = 0
            while pull.state == "downloading":
                if pull.total and pull.done != num_sent:
                    num_sent = pull.done
                    await send_line(**figures, total=pull.total, completed=num_sent)
                await asyncio.sleep(_INTERVAL_S)
            if pull.total and pull.state == "here" and num_sent < pull.total:
                await send_line(**figures, total=pull.total, completed=pull.total)
            if (error := _error_of(pull)) is not None:
                await send({"type": "http.response.body", "body": ERRORS.frame(error)})
                return
        await send_line(status="success")
        await send({"type": "http.response.body", "body": b""})


def _error_of(pull: Pull) -> RequestError | None:
    """Return the error of a download that ended without success; None if there is no error."""
    if pull.state == "stopped":
        return RequestError("cancelled", "The download was stopped; the downloaded part is kept.")
    return pull.error


def _entry(view: ModelView) -> dict[str, Any]:
    ready = view.ready
    mark = f"{view.root}:{ready.fingerprint if ready else ''}"
    return {
        "name": view.id,
        "model": view.id,
        "modified_at": utc(view.created),
        "size": ready.weight_bytes if ready else view.estimated_bytes(),
        "digest": hashlib.sha256(mark.encode()).hexdigest(),
        "details": _details(view.text),
        "capabilities": view.capabilities,
    }


def _memory_fields(view: ModelView) -> dict[str, Any]:
    assert view.ready
    return {
        "size_vram": view.ready.weight_bytes if view.ready.device.startswith("cuda") else 0,
        "context_length": view.context,
        "expires_at": _NEVER,
    }


def _details(text: ServedModel | None) -> dict[str, Any]:
    if text is None:
        names = ("parent_model", "format", "family", "parameter_size", "quantization_level")
        return dict.fromkeys(names, "") | {"families": []}
    family = family_of(text)
    return {
        "parent_model": "",
        "format": "gguf" if text.spec.is_gguf else "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": _rounded(text.num_parameters) if text.num_parameters else "",
        "quantization_level": precision_of(text),
    }


def _rounded(num: int) -> str:
    if num >= 1e9:
        return f"{num / 1e9:.1f}B"
    return f"{num / 1e6:.2f}M" if num >= 1e6 else f"{num / 1e3:.2f}K"


def _described(view: ModelView) -> dict[str, Any]:
    text = view.text
    assert text, "a model is read before it is described"
    family = family_of(text)
    info: dict[str, Any] = {"general.architecture": family, "general.basename": view.name}
    if view.context:
        info[f"{family}.context_length"] = view.context
    if text.num_parameters:
        info["general.parameter_count"] = text.num_parameters
    if width := width_of(text):
        info[f"{family}.embedding_length"] = width
    return {
        "template": text.template.source if text.template else "",
        "details": _details(text),
        "model_info": info,
        "capabilities": view.capabilities,
        "modified_at": utc(view.created),
    }
