"""A model as the lists of models show it, in the shapes of OpenAI's and Anthropic's APIs."""

from datetime import UTC, datetime
from typing import Any

from headrace.gateway.introductions import introduction
from headrace.gateway.model_view import ModelView
from headrace_common.messages import Ready

_LIMIT_NAMES = ("context_length", "context_window", "max_context_length")


def entry_of(view: ModelView, has_states: bool) -> dict[str, Any]:
    """Return a model in the shape of OpenAI's API, with its state if there may be several."""
    text = view.text
    entry = {
        "id": view.id,
        "object": "model",
        "created": view.created,
        "owned_by": "headrace",
        "root": view.name if view.is_adapter else view.root,
        "parent": view.model if view.is_adapter else None,
        "max_model_len": view.context if text else None,
    }
    if text is None:
        entry["meta"] = None
    else:
        config = text.spec.config
        entry["architecture"] = {
            "input_modalities": view.modalities,
            "output_modalities": ["text"],
        }
        entry["meta"] = {
            "n_ctx_train": text.spec.max_positions,
            "n_embd": (config.get("text_config") or config).get("hidden_size"),
            "n_params": text.num_parameters,
            "n_vocab": text.vocab_size,
            "size": view.ready.weight_bytes if view.ready else None,
        }
        entry |= introduction(text)
    if view.id != view.name:
        entry["alias_of"] = view.name
    if view.context:
        entry |= dict.fromkeys(_LIMIT_NAMES, view.context)
    if not has_states:
        return entry
    kind, lane = (model_kind(view.ready), view.ready.lane) if view.ready else (None, None)
    return entry | {"status": view.status, "kind": kind, "lane": lane}


def anthropic_entry(view: ModelView) -> dict[str, Any]:
    """Return a model in the shape of Anthropic's API."""
    limit = view.context or None
    return {
        "type": "model",
        "id": view.id,
        "display_name": view.shown,
        "created_at": utc(view.created),
        "lifecycle": "active",
        "max_input_tokens": limit,
        "max_tokens": limit,
    }


def utc(seconds: int) -> str:
    """Return a time in the form that Anthropic's and Ollama's clients read."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def model_kind(ready: Ready) -> str:
    """Return text, image-text, seq2seq, embedding or ranking."""
    if "generate" not in ready.tasks:
        return "ranking" if "score" in ready.tasks else "embedding"
    if ready.source is not None:
        return "seq2seq"
    return "image-text" if ready.facts.encoder else "text"
