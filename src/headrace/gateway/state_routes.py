"""The routes that say how the server is and what it serves; none waits for a step."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from headrace import __version__
from headrace.core.errors import RequestError
from headrace.gateway.answers import answer, refuse
from headrace.gateway.openapi import document
from headrace.generation.generation import Generation
from headrace.generation.served import ServedModel
from headrace.protocols.frames import encode

UNABLE = {
    "loading": RequestError("model_loading", "Loading model"),
    "draining": RequestError("server_shutdown", "The server is shutting down."),
    "dead": RequestError("engine_failed", "The engine stopped for good."),
}


class StateRoutes:
    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    async def live(self, request: Request) -> ASGIApp:
        return answer({"status": "ok"})

    async def health(self, request: Request) -> ASGIApp:
        state = self._generation.state
        return unhealthy(state) if state in UNABLE else answer({"status": state})

    async def models(self, request: Request) -> ASGIApp:
        models = self._generation.models.all()
        entries = [_entry(model, name) for model in models for name in model.names]
        return answer({"object": "list", "data": entries})

    async def model(self, request: Request) -> ASGIApp:
        name = request.path_params["id"]
        return answer(_entry(self._generation.models.get(name), name))

    async def openapi(self, request: Request) -> ASGIApp:
        return answer(document())

    async def props(self, request: Request) -> ASGIApp:
        return answer(_props(self._generation.models.get(None)))


def unhealthy(state: str, **more: Any) -> Response:
    """Answers why nothing is served, with what `more` there is to know about it."""
    error = UNABLE[state]
    shown: dict[str, Any] = {"message": error.message, "type": error.kind.type}
    if state == "loading":  # as clients that wait for a load know it
        shown = {"code": error.kind.status, **shown}
    else:
        shown |= {"param": None, "code": error.code}
    body = encode({"status": state, "error": shown, **more})
    return Response(body, 503, _without_length(refuse(error)), "application/json")


def _without_length(response: Response) -> dict[str, str]:
    return {k: v for k, v in response.headers.items() if not k.startswith("content-")}


def _entry(model: ServedModel, name: str) -> dict[str, Any]:
    ready, spec = model.ready, model.spec
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "headrace",
        "root": model.root,
        "parent": None,
        "max_model_len": model.max_model_len,
        "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
        "meta": {
            "n_ctx_train": spec.max_positions,
            "n_embd": (spec.config.get("text_config") or spec.config).get("hidden_size"),
            "n_params": ready.num_parameters if ready else None,
            "n_vocab": model.vocab_size,
            "size": ready.weight_bytes if ready else None,
        },
    }


def _props(model: ServedModel) -> dict[str, Any]:
    ready, defaults = model.ready, model.defaults
    params = {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "n": 1,
        "seed": -1,
    }
    own = {name: getattr(defaults, name, None) for name in params}
    params |= {name: value for name, value in own.items() if value is not None}
    return {
        "default_generation_settings": {"params": params, "n_ctx": model.max_model_len},
        "total_slots": ready.max_num_seqs if ready else None,
        "model_alias": model.names[0],
        "model_path": model.root,
        "chat_template": model.template.source if model.template else None,
        "bos_token": model.tokenizer.bos_token,
        "eos_token": model.tokenizer.eos_token,
        "modalities": {"vision": False, "audio": False},
        "build_info": f"headrace {__version__}",
        "is_sleeping": False,
        "lane": ready.lane if ready else None,
        "device": ready.device if ready else None,
        "dtype": ready.dtype if ready else None,
    }
