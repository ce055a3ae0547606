"""Lists models as LM Studio's REST API v0 does. Clients read context lengths and states here."""

from typing import Any

from starlette.requests import Request
from starlette.types import ASGIApp

from headrace.fleet.fleet import Fleet
from headrace.gateway.delivery import unless_left
from headrace.gateway.http_responses import answer
from headrace.gateway.llama_routes import read_known
from headrace.gateway.model_entries import family_of, precision_of
from headrace.gateway.model_view import LOADED, ModelView, view_named, views_of

KEYS = ("id", "object", "type", "publisher", "arch", "compatibility_type", "state")
_CAPABILITIES = {"tools": "tool_use", "vision": "vision"}


class LmStudioRoutes:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def models(self, request: Request) -> ASGIApp:
        entries = [_entry(view) for view in views_of(self._fleet.hosts)]
        return answer({"object": "list", "data": entries})

    async def model(self, request: Request) -> ASGIApp:
        name = request.path_params["id"]
        host = self._fleet.hosts.get(name)
        if host.known is None:
            await unless_left(request.receive, read_known(host))
        return answer(_entry(view_named(self._fleet.hosts, name)))


def _entry(view: ModelView) -> dict[str, Any]:
    text, is_loaded = view.text, view.state in LOADED and view.ready is not None
    owner, slash, name = view.root.partition("/")
    entry = {
        "id": view.id,
        "object": "model",
        "type": _type_of(view),
        "publisher": owner if slash and owner and "/" not in name else "",
        "arch": family_of(text) if text else None,
        # LM Studio calls models in safetensors "mlx". Zed can only read these two values.
        "compatibility_type": "gguf" if text and text.spec.is_gguf else "mlx",
        "quantization": (precision_of(text) or None) if text else None,
        "state": "loaded" if is_loaded else "loading" if view.state == "loading" else "not-loaded",
        "max_context_length": view.context or None,
        "capabilities": [_CAPABILITIES[it] for it in view.capabilities if it in _CAPABILITIES],
    }
    return entry | ({"loaded_context_length": view.context} if is_loaded else {})


def _type_of(view: ModelView) -> str:
    if view.capabilities and "completion" not in view.capabilities:
        return "embeddings"
    return "vlm" if "vision" in view.capabilities else "llm"
