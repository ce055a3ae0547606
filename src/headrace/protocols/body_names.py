"""Reads the names of models and of conversations from request bodies."""

from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.protocols import batch_lines
from headrace.protocols.fields.kinds import Kind, String, missing, read_fields
from headrace.protocols.requests import decode
from headrace_common.worker_jobs import ModelsNamedIn

MODEL: Mapping[str, Kind] = {"model": String(least=1)}


class _ModelField(msgspec.Struct):
    model: Any = None


_model_field_of = msgspec.json.Decoder(_ModelField).decode


def model_name(body: bytes) -> str | None:
    """Return the model that a body names in `model`, or in `name` as older Ollama clients do.

    Ollama's command line sends both fields and leaves one field empty. An empty name counts as
    absent.
    """
    fields = read_fields({"model": String(), "name": String()}, decode(body))
    return fields.get("model") or fields.get("name") or None


def required_model_name(body: bytes) -> str:
    name = model_name(body)
    if name is None:
        raise missing("model")
    return name


def model_names(body: bytes, place: ModelsNamedIn) -> set[str | None]:
    """Return the names of the models in a body, in the lines of a batch, or in a batch's requests.

    The set contains None if a line or request names no model or is malformed. A later check
    reports the fault of a malformed line or request.
    """
    if place == "body":
        return {model_name(body)}
    split = batch_lines.bodies_of_lines if place == "lines" else batch_lines.bodies_of_requests
    return set(map(_model_in, split(body)))


def _model_in(body: msgspec.Raw) -> str | None:
    try:
        model = _model_field_of(body).model
    except (ValueError, RecursionError):
        return None
    return model if isinstance(model, str) else None


def conversation_names(body: bytes) -> tuple[str, ...]:
    wanted = decode(body).get("conversation_ids")
    names = wanted if isinstance(wanted, list) else []
    return tuple(name for name in names if isinstance(name, str) and name)
