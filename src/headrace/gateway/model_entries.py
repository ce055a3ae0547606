"""A served name as the lists of models show it, in the shapes of OpenAI's and Anthropic's APIs."""

from datetime import UTC, datetime
from typing import Any, NamedTuple

from headrace.fleet.model_host import ModelHost
from headrace.fleet.served_model import ServedModel
from headrace.gateway.introductions import introduction
from headrace.text.model_names import Models, called
from headrace_common.messages import Ready

_LIMIT_NAMES = ("context_length", "context_window", "max_context_length")


class ServedName(NamedTuple):
    """A name that clients may ask for, and the host and the model or adapter that it stands for.

    `id` differs from `name` if it is an alias.
    """

    id: str
    host: ModelHost
    name: str

    @property
    def shown(self) -> str:
        """The name for people, which says what an alias stands for."""
        return self.id if self.id == self.name else f"{self.id} ({self.name})"

    @property
    def context(self) -> int:
        """The longest prompt and answer together, in tokens; 0 if it is not known."""
        return self.host.known.max_model_len if self.host.known else 0

    @property
    def modalities(self) -> list[str] | None:
        """The kinds of input that the model takes; None if the model was never read."""
        if self.host.known is None:
            return None
        return ["text", "image"] if self.host.known.has_vision else ["text"]


def served_names(hosts: Models[ModelHost]) -> list[ServedName]:
    """Return every name that the lists show."""
    names = [ServedName(name, host, name) for host in hosts.all() for name in host.names]
    return names + [ServedName(it, hosts.get(it), name) for it, name in hosts.aliases.items()]


def named(hosts: Models[ModelHost], id: str) -> ServedName:
    """Return the entry of a name or path that a client asks for; RequestError if it is unknown."""
    host, meant = hosts.get(id), hosts.resolve(id)
    name = called(host, meant)
    return ServedName(name if meant == id else id, host, name)


def entry_of(one: ServedName, has_states: bool) -> dict[str, Any]:
    """A model in the list of models, with its state if there may be several."""
    host, name = one.host, one.name
    if host.known is not None:
        entry = _entry(host.known, name)
        if name in host.known.adapters:
            entry |= {"root": name, "parent": host.name}
    else:
        entry = {"id": name, "object": "model", "created": 0, "owned_by": "headrace"}
        entry |= {"root": host.root, "parent": None, "max_model_len": None, "meta": None}
    if one.id != name:
        entry |= {"id": one.id, "alias_of": name}
    if one.context:
        entry |= dict.fromkeys(_LIMIT_NAMES, one.context)
    if not has_states:
        return entry
    lane = host.ready.lane if host.ready else None
    kind = _kind(host.ready) if host.ready else None
    return entry | {"status": status_of(host), "kind": kind, "lane": lane}


def anthropic_entry(one: ServedName) -> dict[str, Any]:
    """Return a model in the shape of Anthropic's API."""
    created = one.host.known.created if one.host.known else 0
    limit = one.context or None
    return {
        "type": "model",
        "id": one.id,
        "display_name": one.shown,
        "created_at": datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "lifecycle": "active",
        "max_input_tokens": limit,
        "max_tokens": limit,
    }


def _kind(ready: Ready) -> str:
    if "generate" not in ready.tasks:
        return "ranking" if "score" in ready.tasks else "embedding"
    if ready.source is not None:
        return "seq2seq"
    return "image-text" if ready.facts.encoder else "text"


def status_of(host: ModelHost) -> dict[str, Any]:
    """The state of a model, by llama.cpp's names."""
    if host.engine.state == "dead":
        return {"value": "unloaded", "failed": True, "exit_code": 1}
    value = {"ok": "loaded", "recovering": "loaded"}.get(host.engine.state, host.engine.state)
    stages = {} if host.loading.progress is None else {"stage": host.loading.progress.stage}
    if host.engine.state == "loading" and host.loading.downloaded is not None:
        done, total = host.loading.downloaded
        return {"value": value, "bytes_done": done, "bytes_total": total, **stages}
    if host.loading.share is not None:
        return {"value": value, "progress": host.loading.share, **stages}
    return {"value": value, **stages}


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
        "architecture": {
            "input_modalities": ["text", "image"] if model.has_vision else ["text"],
            "output_modalities": ["text"],
        },
        "meta": {
            "n_ctx_train": spec.max_positions,
            "n_embd": (spec.config.get("text_config") or spec.config).get("hidden_size"),
            "n_params": model.num_parameters,
            "n_vocab": model.vocab_size,
            "size": ready.weight_bytes if ready else None,
        },
        **introduction(model),
    }
