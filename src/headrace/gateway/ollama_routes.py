"""Routes by which Ollama's clients learn which models there are."""

import hashlib
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from headrace import __version__
from headrace.core.jobs import ReadModelName
from headrace.fleet.model_host import ModelHost
from headrace.fleet.served_model import ServedModel
from headrace.gateway.bodies import Bodies
from headrace.gateway.delivery import unless_left
from headrace.gateway.http_responses import answer
from headrace.gateway.llama_routes import read_known
from headrace.generation.generation import Generation

_LOADED = ("ok", "recovering")


class OllamaRoutes:
    def __init__(self, generation: Generation, bodies: Bodies) -> None:
        self._hosts = generation.fleet.hosts
        self._work = generation.work
        self._bodies = bodies

    async def version(self, request: Request) -> ASGIApp:
        """The version of Headrace, not of the Ollama whose API this is."""
        return answer({"version": __version__})

    async def tags(self, request: Request) -> ASGIApp:
        hosts = self._hosts.all()
        return answer({"models": [_entry(host, name) for host in hosts for name in host.names]})

    async def running(self, request: Request) -> ASGIApp:
        """Models in memory; when one will leave it, nobody knows."""
        loaded = [host for host in self._hosts.all() if host.engine.state in _LOADED and host.ready]
        return answer({"models": [_entry(host, host.name) | _place(host) for host in loaded]})

    async def show(self, request: Request) -> ASGIApp:
        async with self._bodies.read(request) as body:
            naming = self._work.do(ReadModelName(), body)
            host = self._hosts.get(await unless_left(request.receive, naming))
        if host.known is None:
            await unless_left(request.receive, read_known(host))
        return answer(_described(host.model))


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
    }


def _place(host: ModelHost) -> dict[str, Any]:
    assert host.ready
    is_on_gpu = host.ready.device.startswith("cuda")
    length = host.model.max_model_len
    return {"size_vram": host.ready.weight_bytes if is_on_gpu else 0, "context_length": length}


def _details(known: ServedModel | None) -> dict[str, Any]:
    if known is None:
        return {"format": "", "family": "", "families": [], "parameter_size": ""}
    ready, family = known.ready, str(known.spec.config.get("model_type", ""))
    return {
        "format": "gguf" if known.spec.is_gguf else "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": f"{ready.num_parameters / 1e6:.0f}M" if ready else "",
        "quantization_level": _precision(known),
    }


def _precision(known: ServedModel) -> str:
    ready = known.ready
    if ready is None:
        return ""
    return ready.dtype if ready.quantize == "none" else ready.quantize


def _described(model: ServedModel) -> dict[str, Any]:
    family = str(model.spec.config.get("model_type", ""))
    info = {"general.architecture": family, f"{family}.context_length": model.max_model_len}
    if model.ready:
        info["general.parameter_count"] = model.ready.num_parameters
    return {
        "template": model.template.source if model.template else "",
        "details": _details(model),
        "model_info": info,
        "capabilities": _capabilities(model),
        "modified_at": _at(model.created),
    }


def _capabilities(model: ServedModel) -> list[str]:
    tasks = model.ready.tasks if model.ready else ("generate",)
    can = {
        "completion": "generate" in tasks,
        "embedding": "embed" in tasks and "generate" not in tasks,
        "tools": "generate" in tasks and bool(model.tool_format),
        "thinking": bool(model.reasoning_format),
        "vision": model.has_vision,
        "insert": model.tokenizer.infill_marks is not None,
    }
    return [name for name, is_there in can.items() if is_there]


def _at(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
