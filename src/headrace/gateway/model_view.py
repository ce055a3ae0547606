"""Gathers the data that routes show about a model. Each API renders this data in its own format."""

from collections.abc import Callable
from typing import Any

import msgspec

from headrace.fleet.model_host import ModelHost
from headrace.fleet.served_model import ServedModel
from headrace.text.model_names import Models, called
from headrace_common.messages import Ready

LOADED = ("ok", "recovering")
"""The states of an engine whose model is in memory."""


class ModelView(msgspec.Struct, frozen=True):
    """Describes a name that clients can use, and the current state of the model or adapter.

    If `id` differs from `name`, the id is an alias. `text` is None until the model has been read,
    and `ready` is None until the model has been loaded.
    """

    id: str
    name: str
    # The first name of the model. For an adapter, this is the name of the base model.
    model: str
    root: str
    # The state of the engine.
    state: str
    # The state and progress, under llama.cpp's names.
    status: dict[str, Any]
    text: ServedModel | None
    ready: Ready | None
    # Reads the sizes of the model's files, and returns the memory that the model needs.
    estimated_bytes: Callable[[], int]
    created: int = 0
    # Maximum number of tokens of a prompt and its answer together; 0 if unknown.
    context: int = 0
    modalities: tuple[str, ...] = ()
    # The abilities of the model, under Ollama's names.
    capabilities: tuple[str, ...] = ()

    @property
    def shown(self) -> str:
        """Returns the name for people. For an alias, the real name follows in parentheses."""
        return self.id if self.id == self.name else f"{self.id} ({self.name})"

    @property
    def is_adapter(self) -> bool:
        return self.text is not None and self.name in self.text.adapters


def view_of(host: ModelHost, name: str, id: str | None = None) -> ModelView:
    """Return the view of one of a host's names; with `id`, the view of this alias of the name."""
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
    """Return the views of all names in the lists of models."""
    views = [view_of(host, name) for host in hosts.all() for name in host.names]
    return views + [view_of(hosts.get(it), name, it) for it, name in hosts.aliases.items()]


def view_named(hosts: Models[ModelHost], id: str) -> ModelView:
    """Return the view of the name or path `id`; raise RequestError if no model has this name."""
    host, meant = hosts.get(id), hosts.resolve(id)
    name = called(host, meant)
    return view_of(host, name, name if meant == id else id)


def status_of(host: ModelHost) -> dict[str, Any]:
    """Return the state of a model, under llama.cpp's names."""
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
