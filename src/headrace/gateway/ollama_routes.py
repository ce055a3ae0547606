"""Routes by which Ollama's clients learn which models there are, and take or delete some."""

import asyncio
import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
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
from headrace.gateway.model_entries import served_names
from headrace.generation.generation import Generation
from headrace.protocols.dialect import encode
from headrace.protocols.fields.kinds import Flag, Kind, String, missing, read_fields
from headrace.protocols.framing import LINES
from headrace.protocols.ollama.errors import ERRORS
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
        served = served_names(self._hosts)
        return answer({"models": [_entry(one.host, one.id) for one in served]})

    async def running(self, request: Request) -> ASGIApp:
        """Lists the models in memory; none has a set time at which it leaves."""
        loaded = [host for host in self._hosts.all() if host.engine.state in _LOADED and host.ready]
        return answer({"models": [_entry(host, host.name) | _place(host) for host in loaded]})

    async def show(self, request: Request) -> ASGIApp:
        async with self._bodies.read(request) as body:
            naming = self._work.do(ReadModelName(), body)
            name = await unless_left(request.receive, naming)
        host = self._hosts.get(name)
        if host.known is None:
            await unless_left(request.receive, read_known(host))
        return answer(_described(host.model, name if name in host.names else host.name))

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


def _entry(host: ModelHost, name: str) -> dict[str, Any]:
    """One name of a model; what was not read yet is not known."""
    ready, known = host.ready, host.known
    mark = f"{host.root}:{ready.fingerprint if ready else ''}"
    return {
        "name": name,
        "model": name,
        "modified_at": _at(known.created if known else 0),
        "size": ready.weight_bytes if ready else host.num_bytes,
        "digest": hashlib.sha256(mark.encode()).hexdigest(),
        "details": _details(known),
        "capabilities": _capabilities(known) if known else [],
    }


def _place(host: ModelHost) -> dict[str, Any]:
    assert host.ready
    is_on_gpu = host.ready.device.startswith("cuda")
    length = host.model.max_model_len
    return {
        "size_vram": host.ready.weight_bytes if is_on_gpu else 0,
        "context_length": length,
        "expires_at": _NEVER,
    }


def _details(known: ServedModel | None) -> dict[str, Any]:
    if known is None:
        names = ("parent_model", "format", "family", "parameter_size", "quantization_level")
        return dict.fromkeys(names, "") | {"families": []}
    family = _family(known)
    return {
        "parent_model": "",
        "format": "gguf" if known.spec.is_gguf else "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": _rounded(known.num_parameters) if known.num_parameters else "",
        "quantization_level": _precision(known),
    }


def _precision(known: ServedModel) -> str:
    ready = known.ready
    if ready is None:
        return "" if known.spec.is_gguf else known.spec.dtype
    return ready.dtype if ready.quantize == "none" else ready.quantize


def _rounded(num: int) -> str:
    if num >= 1e9:
        return f"{num / 1e9:.1f}B"
    return f"{num / 1e6:.2f}M" if num >= 1e6 else f"{num / 1e3:.2f}K"


def _family(model: ServedModel) -> str:
    return str(model.spec.config.get("model_type") or model.spec.architecture)


def _described(model: ServedModel, name: str) -> dict[str, Any]:
    family = _family(model)
    info: dict[str, Any] = {"general.architecture": family, "general.basename": name}
    if model.max_model_len:
        info[f"{family}.context_length"] = model.max_model_len
    if model.num_parameters:
        info["general.parameter_count"] = model.num_parameters
    return {
        "template": model.template.source if model.template else "",
        "details": _details(model),
        "model_info": info,
        "capabilities": _capabilities(model),
        "modified_at": _at(model.created),
    }


def _capabilities(model: ServedModel) -> list[str]:
    can = {
        "completion": "generate" in model.tasks,
        "embedding": "embed" in model.tasks and "generate" not in model.tasks,
        "tools": "generate" in model.tasks and bool(model.tool_format),
        "thinking": bool(model.reasoning_format),
        "vision": model.has_vision,
        "insert": model.tokenizer.infill_marks is not None,
    }
    return [name for name, is_there in can.items() if is_there]


def _at(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
