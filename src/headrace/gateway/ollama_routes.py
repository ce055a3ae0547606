"""Routes by which Ollama's clients learn which models there are, and take or delete some."""

import asyncio
import hashlib
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.fleet.model_host import ModelHost
from headrace.fleet.model_list import Desired
from headrace.fleet.pulls import Pull
from headrace.fleet.served_model import ServedModel
from headrace.gateway.bodies import Bodies
from headrace.gateway.delivery import unless_left, while_connected
from headrace.gateway.http_responses import answer
from headrace.gateway.llama_routes import read_known
from headrace.gateway.model_entries import utc
from headrace.gateway.model_view import ModelView, view_of, views_of
from headrace.generation.generation import Generation
from headrace.protocols.dialect import encode
from headrace.protocols.fields.kinds import Flag, Kind, String, missing, read_fields
from headrace.protocols.framing import LINES
from headrace.protocols.ollama.answers import ERRORS
from headrace.protocols.requests import decode
from headrace.text.model_names import Models
from headrace_common.errors import RequestError
from headrace_common.jobs import ReadModelName
from headrace_common.version import __version__

_LOADED = ("ok", "recovering")
_API_VERSION = "0.12.6"
"""The version of Ollama whose API this is. VS Code and Raycast want 0.6.4 or later."""


_NEVER = "9999-12-31T23:59:59Z"
_MAX_BODY = 1 << 16
_INTERVAL_S = 0.25
_HUBS = ("hf.co/", "huggingface.co/")  # before the ids of those that are not in Ollama's registry

NAMED: Mapping[str, Kind] = {"model": String(least=1), "name": String(least=1)}
PULL: Mapping[str, Kind] = {**NAMED, "stream": Flag(), "insecure": Flag()}


class OllamaRoutes:
    def __init__(self, generation: Generation, bodies: Bodies) -> None:
        self._generation = generation
        self._work = generation.work
        self._bodies = bodies

    async def version(self, request: Request) -> ASGIApp:
        """Answer with the API's version: clients refuse versions that are too old for them."""
        return answer({"version": _API_VERSION, "headrace": __version__})

    async def tags(self, request: Request) -> ASGIApp:
        return answer({"models": [_entry(view) for view in views_of(self._hosts)]})

    async def running(self, request: Request) -> ASGIApp:
        """Lists the models in memory; none has a set time at which it leaves."""
        views = [view_of(host, host.name) for host in self._hosts.all()]
        loaded = [view for view in views if view.state in _LOADED and view.ready]
        return answer({"models": [_entry(view) | _place(view) for view in loaded]})

    async def show(self, request: Request) -> ASGIApp:
        async with self._bodies.read(request) as body:
            naming = self._work.do(ReadModelName(), body)
            name = await unless_left(request.receive, naming)
        host = self._hosts.get(name)
        if host.known is None:
            await unless_left(request.receive, read_known(host))
        return answer(_described(view_of(host, name if name in host.names else host.name)))

    async def pull(self, request: Request) -> ASGIApp:
        """Downloads a model of the hub; it goes on when the client has left."""
        asked = await self._read(request, PULL)
        pulling = self._desired().pull(_model_of(asked))
        pull = await unless_left(request.receive, pulling)
        if asked.get("stream", True):
            return PullLines(pull)
        if pull is not None:
            await unless_left(request.receive, pull.over.wait())
            if (error := _why_not(pull)) is not None:
                raise error
        return answer({"status": "success"})

    async def delete(self, request: Request) -> ASGIApp:
        await self._desired().delete(_model_of(await self._read(request, NAMED)))
        return Response()

    async def _read(self, request: Request, table: Mapping[str, Kind]) -> dict[str, Any]:
        async with self._bodies.read(request) as body:
            whole = b"".join(body)
        if len(whole) > _MAX_BODY:
            message = f"The body has {len(whole)} bytes; {_MAX_BODY} are taken here."
            raise RequestError("request_too_large", message)
        return read_fields(table, decode(whole))

    def _desired(self) -> Desired:
        assert self._generation.desired is not None
        return self._generation.desired

    @property
    def _hosts(self) -> Models[ModelHost]:
        return self._generation.fleet.hosts


def _model_of(asked: dict[str, Any]) -> str:
    name = asked.get("model") or asked.get("name")
    if name is None:
        raise missing("model")
    for prefix in _HUBS:
        name = name.removeprefix(prefix)
    return str(name).removesuffix(":latest")


class PullLines:
    """How far a download is, in lines of JSON as Ollama tells it; None: it is here already."""

    def __init__(self, pull: Pull | None) -> None:
        self._pull = pull

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", LINES.MEDIA_TYPE.encode()), (b"cache-control", b"no-cache")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await while_connected(receive, self._show(send))

    async def _show(self, send: Send) -> None:
        async def tell(**line: Any) -> None:
            body = encode(line) + b"\n"
            await send({"type": "http.response.body", "body": body, "more_body": True})

        await tell(status="pulling manifest")
        if (pull := self._pull) is not None:
            digest = hashlib.sha256(pull.model.encode()).hexdigest()
            figures = {"status": f"pulling {digest[:12]}", "digest": f"sha256:{digest}"}
            told = 0
            while pull.state == "downloading":
                if pull.total and pull.done != told:
                    told = pull.done
                    await tell(**figures, total=pull.total, completed=told)
                await asyncio.sleep(_INTERVAL_S)
            if pull.total and pull.state == "here" and told < pull.total:
                await tell(**figures, total=pull.total, completed=pull.total)
            if (error := _why_not(pull)) is not None:
                await send({"type": "http.response.body", "body": ERRORS.frame(error)})
                return
        await tell(status="success")
        await send({"type": "http.response.body", "body": b""})


def _why_not(pull: Pull) -> RequestError | None:
    """The reason why a download that is over brought nothing."""
    if pull.state == "stopped":
        return RequestError("cancelled", "The download was stopped; what has come is kept.")
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


def _place(view: ModelView) -> dict[str, Any]:
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
    family, spec, ready = _family(text), text.spec, text.ready
    if ready is not None:
        precision = ready.dtype if ready.quantize == "none" else ready.quantize
    else:
        precision = "" if spec.is_gguf else spec.dtype
    return {
        "parent_model": "",
        "format": "gguf" if spec.is_gguf else "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": _rounded(text.num_parameters) if text.num_parameters else "",
        "quantization_level": precision,
    }


def _rounded(num: int) -> str:
    if num >= 1e9:
        return f"{num / 1e9:.1f}B"
    return f"{num / 1e6:.2f}M" if num >= 1e6 else f"{num / 1e3:.2f}K"


def _family(text: ServedModel) -> str:
    return str(text.spec.config.get("model_type") or text.spec.architecture)


def _described(view: ModelView) -> dict[str, Any]:
    text = view.text
    assert text, "a model is read before it is described"
    family = _family(text)
    info: dict[str, Any] = {"general.architecture": family, "general.basename": view.name}
    if view.context:
        info[f"{family}.context_length"] = view.context
    if text.num_parameters:
        info["general.parameter_count"] = text.num_parameters
    return {
        "template": text.template.source if text.template else "",
        "details": _details(text),
        "model_info": info,
        "capabilities": view.capabilities,
        "modified_at": utc(view.created),
    }
