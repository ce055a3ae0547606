"""Renders the entry of a model in lists of models, in OpenAI's or Anthropic's format."""

from datetime import UTC, datetime
from typing import Any

from headrace.fleet.served_model import ServedModel
from headrace.gateway.introductions import introduction
from headrace.gateway.model_view import ModelView
from headrace_common.checkpoints.spec import is_mxfp4
from headrace_common.messages import Ready

# Ollama's names.
_SHORT = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
_LIMIT_NAMES = ("context_length", "context_window", "max_context_length")


def entry_of(view: ModelView, has_states: bool) -> dict[str, Any]:
    """Return a model in the format of OpenAI's API; `has_states` adds the model's state."""
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
        entry["architecture"] = {
            "input_modalities": view.modalities,
            "output_modalities": ["text"],
        }
        entry["meta"] = {
            "n_ctx_train": text.spec.max_positions,
            "n_embd": width_of(text),
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


def width_of(text: ServedModel) -> int | None:
    """Return the hidden size from the model's config.json, or None if no size is given."""
    config = text.spec.config
    config = config.get("text_config") or config
    named = (config.get(name) for name in ("hidden_size", "d_model", "n_embd"))
    return next((width for width in named if type(width) is int), None)


def family_of(text: ServedModel) -> str:
    """Return the model's family, such as llama."""
    config = text.spec.config
    return str(config.get("gguf_family") or config.get("model_type") or text.spec.architecture)


def precision_of(text: ServedModel) -> str:
    """Return the number format of the weights, such as Q4_K_M, BF16 or int8."""
    spec, ready = text.spec, text.ready
    if ready is not None and ready.quantize != "own":
        return ready.quantize if ready.quantize != "none" else _SHORT.get(ready.dtype, ready.dtype)
    plain = "MXFP4" if is_mxfp4(spec.config) else _SHORT.get(spec.dtype, spec.dtype)
    return str(spec.config.get("gguf_type") or plain)


def anthropic_entry(view: ModelView) -> dict[str, Any]:
    """Return a model in the format of Anthropic's API."""
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
    """Write a time in the format of Anthropic's and Ollama's APIs."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def model_kind(ready: Ready) -> str:
    """Return the kind of the model: text, image-text, seq2seq, embedding or ranking."""
    if "generate" not in ready.tasks:
        return "ranking" if "score" in ready.tasks else "embedding"
    if ready.source is not None:
        return "seq2seq"
    return "image-text" if ready.facts.encoder else "text"
