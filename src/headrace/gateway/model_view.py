"""Everything that the routes show of a model; each API renders it in its own shape."""

from collections.abc import Callable
from typing import Any

import msgspec

from headrace.fleet.model_host import ModelHost
from headrace.fleet.served_model import ServedModel
from headrace.text.model_names import Models, called
from headrace_common.messages import Ready


class ModelView(msgspec.Struct, frozen=True):
    """A name that clients may ask for, and the state of its model or adapter now.

    `id` differs from `name` if it is an alias. A model that was never read has no `text`, and a
    model that was never loaded has no `ready`.
    """

    id: str
    name: str
    model: str  # the first name of the model, also for an adapter
    root: str
    state: str  # of the engine
    status: dict[str, Any]  # by llama.cpp's names
    text: ServedModel | None
    ready: Ready | None
    estimated_bytes: Callable[[], int]  # looks at the model's files
    created: int = 0
    context: int = 0  # longest prompt and answer together, in tokens; 0 if it is not known
    modalities: tuple[str, ...] = ()
    capabilities: tuple[str, ...] = ()  # by Ollama's names

    @property
    def shown(self) -> str:
        """The name for people, which says what an alias stands for."""
        return self.id if self.id == self.name else f"{self.id} ({self.name})"

    @property
    def is_adapter(self) -> bool:
        return self.text is not None and self.name in self.text.adapters


def view_of(host: ModelHost, name: str, id: str | None = None) -> ModelView:
    """Return the view of one of a host's names, or of an alias `id` that stands for it."""
    text = host.known
    view = ModelView(
        id=id or name,
        name=name,
        model=host.name,
        root=host.root,
        state=host.engine.state,
        status=status_of(host),
        text=text,
        ready=host.ready,
        estimated_bytes=lambda: host.num_bytes,
    )
    if text is None:
        return view
    return msgspec.structs.replace(
        view,
        created=text.created,
        context=text.max_model_len,
        modalities=("text", "image") if text.has_vision else ("text",),
        capabilities=_capabilities(text),
    )


def views_of(hosts: Models[ModelHost]) -> list[ModelView]:
    """Return the view of every name that the lists show."""
    views = [view_of(host, name) for host in hosts.all() for name in host.names]
    return views + [view_of(hosts.get(it), name, it) for it, name in hosts.aliases.items()]


def view_named(hosts: Models[ModelHost], id: str) -> ModelView:
    """Return the view of a name or path that a client asks for; RequestError if it is unknown."""
    host, meant = hosts.get(id), hosts.resolve(id)
    name = called(host, meant)
    return view_of(host, name, name if meant == id else id)


def status_of(host: ModelHost) -> dict[str, Any]:
    """Return the state of a model, by llama.cpp's names."""
    if host.engine.state == "dead":
        return {"value": "unloaded", "failed": True, "exit_code": 1}
    value = {"ok": "loaded", "recovering": "loaded"}.get(host.engine.state, host.engine.state)
    progress, downloaded = host.loading.progress, host.loading.downloaded
    stages = {} if progress is None else {"stage": progress.stage}
    if host.engine.state == "loading" and downloaded is not None:
        done, total = downloaded
        return {"value": value, "bytes_done": done, "bytes_total": total, **stages}
    if host.loading.share is not None:
        return {"value": value, "progress": host.loading.share, **stages}
    return {"value": value, **stages}


def _capabilities(model: ServedModel) -> tuple[str, ...]:
    generates = "generate" in model.tasks
    can = {
        "completion": generates,
        "embedding": "embed" in model.tasks and not generates,
        "tools": generates and bool(model.tool_format),
        "thinking": bool(model.reasoning_format),
        "vision": model.has_vision,
        "insert": model.tokenizer.infill_marks is not None,
    }
    return tuple(name for name, is_there in can.items() if is_there)
