"""The OpenAPI document, made from the same tables that check the fields."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from headrace import __version__
from headrace.core.errors import KINDS
from headrace.gateway import chat_schema, completions_schema, text_routes
from headrace.gateway.common_fields import NO_EFFECT, UNSUPPORTED
from headrace.gateway.fields import Kind, nullable

_EMPTY: tuple[Any, ...] = (None, "", [], {})
_BODY_ERRORS = (400, 404, 408, 413, 415)
_ENGINE_ERRORS = (429, 500, 503)
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"enum": sorted({kind.type for kind in KINDS.values()})},
                "param": {"type": ["string", "null"]},
                "code": {"enum": sorted(KINDS)},
            },
        }
    },
}


class Operation(NamedTuple):
    """One route. `keys` are those its answer always has."""

    summary: str
    keys: tuple[str, ...]
    table: Mapping[str, Kind] | None = None
    required: tuple[str, ...] = ()
    generates: bool = False


_STATE = ("status",)
_WHOLE = ("id", "object", "created", "model", "choices", "usage", "timings")
GET = {
    "/health": Operation("Whether requests are served", _STATE),
    "/v1/health": Operation("Whether requests are served", _STATE),
    "/health/live": Operation("Whether the process answers", _STATE),
    "/v1/models": Operation("Every served name", ("object", "data")),
    "/v1/models/{id}": Operation("One served name", ("id", "object", "max_model_len", "meta")),
    "/props": Operation("The model's settings", ("default_generation_settings", "total_slots")),
    "/openapi.json": Operation("This document", ("openapi", "paths")),
}
POST = {
    "/v1/chat/completions": Operation(
        "Answer a conversation", _WHOLE, chat_schema.TABLE, ("messages",), generates=True
    ),
    "/v1/completions": Operation(
        "Continue a text", _WHOLE, completions_schema.TABLE, ("prompt",), generates=True
    ),
    "/tokenize": Operation(
        "Text to token ids", ("tokens", "count", "max_model_len"), text_routes.TOKENIZE
    ),
    "/detokenize": Operation(
        "Token ids to text", ("content", "prompt"), text_routes.DETOKENIZE, ("tokens",)
    ),
    "/apply-template": Operation(
        "The text of a conversation", ("prompt",), text_routes.APPLY_TEMPLATE, ("messages",)
    ),
}


def document() -> dict[str, Any]:
    paths: dict[str, dict[str, Any]] = {path: {"get": _get(path)} for path in GET}
    for path, operation in POST.items():
        paths[path] = {"post": _post(operation)}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Headrace", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {"Error": _ERROR},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
            },
        },
        "security": [{}, {"bearer": []}, {"header": []}],
    }


def _get(path: str) -> dict[str, Any]:
    operation = GET[path]
    responses = {"200": _answer(operation)}
    if operation.keys == _STATE:
        # health needs no key, and says why not in the shape of its answer
        responses |= {} if path.endswith("live") else {"503": _answer(operation)}
    else:
        responses |= _errors((401, 403))
    described: dict[str, Any] = {"summary": operation.summary, "responses": responses}
    if "{id}" in path:
        parameter = {"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}
        described["parameters"] = [parameter]
        responses |= _errors((404,))
    return described


def _post(operation: Operation) -> dict[str, Any]:
    assert operation.table is not None
    errors = (401, 403, *_BODY_ERRORS, *(_ENGINE_ERRORS if operation.generates else ()))
    return {
        "summary": operation.summary,
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": _body(operation)}},
        },
        "responses": _responses(operation, errors),
    }


def _body(operation: Operation) -> dict[str, Any]:
    assert operation.table is not None
    properties = {
        name: kind.schema() if name in operation.required else nullable(kind)
        for name, kind in operation.table.items()
    }
    if operation.generates:
        properties |= {name: {"description": "No effect"} for name in NO_EFFECT}
        properties |= {
            name: {"description": "Not supported", "enum": [*_EMPTY, *neutral]}
            for name, neutral in UNSUPPORTED.items()
        }
    return {"type": "object", "properties": properties, "required": list(operation.required)}


def _responses(operation: Operation, errors: tuple[int, ...]) -> dict[str, Any]:
    return {"200": _answer(operation)} | _errors(errors)


def _answer(operation: Operation) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": _object(operation.keys)}}
    if operation.generates:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {"description": operation.summary, "content": content}


def _errors(statuses: tuple[int, ...]) -> dict[str, Any]:
    schema = {"$ref": "#/components/schemas/Error"}
    content = {"application/json": {"schema": schema}}
    return {str(status): {"description": "Refused", "content": content} for status in statuses}


def _object(keys: tuple[str, ...]) -> dict[str, Any]:
    return {"type": "object", "required": list(keys)}
