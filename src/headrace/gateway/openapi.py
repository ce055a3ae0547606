"""The OpenAPI document, made from the same tables that check the fields."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from headrace import __version__
from headrace.core.errors import RequestError
from headrace.protocols import anthropic_messages, embeddings, openai_responses, rerank, worker
from headrace.protocols.common_fields import NO_EFFECT, UNSUPPORTED
from headrace.protocols.dialect import DIALECTS, Dialect, dialect_of
from headrace.protocols.fields import Kind, nullable

_EMPTY: tuple[Any, ...] = (None, "", [], {})
_AUTH_ERRORS = (401, 403)
_BODY_ERRORS = (400, 404, 408, 413, 415)
_ENGINE_ERRORS = (409, 500, 503)
_PUT_OFF = ("server_overloaded", "rate_limit_exceeded", "request_timeout")
"""Errors to which some dialects give a status of their own."""
_JSON, _EVENTS = "application/json", "text/event-stream"
_FORMS = {route: dialect_of(route).ERRORS.SCHEMA for route in DIALECTS}
_ERRORS = {schema["title"]: schema for schema in _FORMS.values()}
_BYTE_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "object", "required": ["code", "message", "type"]}},
}


class Operation(NamedTuple):
    """One method of one path. `keys` are those its JSON answer always has."""

    summary: str
    keys: tuple[str, ...] = ()
    table: Mapping[str, Kind] | None = None
    required: tuple[str, ...] = ()
    query: tuple[str, ...] = ()
    headers: tuple[str, ...] = ()
    status: int = 200
    media: tuple[str, ...] = (_JSON,)
    errors: tuple[int, ...] = ()
    error: str = "Error"
    auth_error: str = "Error"


def generates(dialect: Dialect) -> Operation:
    errors = dialect.ERRORS
    put_off = {errors.status(RequestError(code, "")) for code in _PUT_OFF}
    return Operation(
        dialect.SUMMARY,
        dialect.KEYS,
        dialect.TABLE,
        dialect.REQUIRED,
        headers=("X-Conversation-Id", "Idempotency-Key"),
        media=(_JSON, _EVENTS),
        errors=(*_BODY_ERRORS, *_ENGINE_ERRORS, *sorted(put_off)),
        error=errors.SCHEMA["title"],
        auth_error=errors.SCHEMA["title"],
    )


def _works_on_text(
    summary: str, keys: tuple[str, ...], table: Mapping[str, Kind], *required: str
) -> Operation:
    return Operation(summary, keys, table, required, errors=_BODY_ERRORS)


_HEALTH = Operation("Whether requests are served", ("status",), errors=(503,))
_STREAM = ("id", "object", "state", "mode", "durable", "last_seq", "total_bytes", "created")
_BY_BYTE = Operation(
    "The body of a POST from a byte on",
    query=("from", "stream_id"),
    media=(_EVENTS, _JSON),
    errors=(400, 404, 416),
    error="ByteError",
)
_RESPONSE = Operation("A response as it stands", openai_responses.KEYS, errors=(404,))
_FORGET = Operation("Stop and forget", status=204, media=(), errors=(400,), error="ByteError")


class _Lenient(msgspec.Struct, frozen=True):
    """A field of a route that skips what it does not understand."""

    description: str

    def check(self, value: Any, path: str) -> Any:
        return value

    def schema(self) -> dict[str, Any]:
        return {"description": self.description}


_BRING = Operation(
    "", ("success",), worker.MODEL, ("model",), errors=(400, 404, 408, 413, 415, 500)
)
_MESSAGES_ERROR: str = anthropic_messages.ERRORS.SCHEMA["title"]
_LOOKUP: Mapping[str, Kind] = {"conversation_ids": _Lenient("Up to 1,000 strings")}

_DOCUMENT = ("models",)

OPERATIONS: Mapping[tuple[str, str], Operation] = {
    ("get", "/health"): _HEALTH,
    ("get", "/v1/health"): _HEALTH,
    ("get", "/health/live"): Operation("Whether the process answers", ("status",)),
    ("get", "/v1/models"): Operation("Every served name", ("object", "data")),
    ("get", "/v1/models/{id}"): Operation(
        "One served name", ("id", "object", "max_model_len", "meta"), errors=(404,)
    ),
    ("get", "/models"): Operation("Every model, with its state", ("object", "data")),
    ("post", "/models/load"): _BRING._replace(summary="Load a model"),
    ("post", "/models/unload"): _BRING._replace(summary="Unload a model once its streams end"),
    ("get", "/props"): Operation(
        "A model's settings",
        ("default_generation_settings",),
        query=("model",),
        errors=(404, 500),
    ),
    ("get", "/tokenizer_info"): Operation(
        "A tokenizer's special tokens, as vLLM shows them",
        ("tokenizer_class", "chat_template"),
        query=("model",),
        errors=(404, 500),
    ),
    ("get", "/slots"): Operation(
        "What runs, as llama.cpp shows it", query=("fail_on_no_slot", "model"), errors=(404, 503)
    ),
    ("get", "/metrics"): Operation("Figures for Prometheus", media=("text/plain",)),
    ("get", "/openapi.json"): Operation("This document", ("openapi", "paths")),
    ("get", "/manage/state"): Operation("How the server is doing", ("state", "engine", "steps")),
    ("get", "/manage/stream"): Operation("The same, again after each change", media=(_EVENTS,)),
    ("get", "/manage/desired"): Operation("The configured models", _DOCUMENT, errors=(400,)),
    ("put", "/manage/desired"): Operation(
        "Replace the configured models",
        _DOCUMENT,
        {name: _Lenient("Objects with the settings of [[models]]") for name in _DOCUMENT},
        _DOCUMENT,
        errors=(400, 408, 413, 415, 500),
    ),
    ("post", "/manage/drain"): Operation("Admit nothing more", ("status", "streams")),
    ("post", "/manage/replicas/replace"): Operation(
        "Put a fresh engine in the place of one of several",
        ("status",),
        query=("model", "replica"),
        errors=(400, 404),
    ),
    ("delete", "/manage/drain"): Operation("Admit requests again", ("status", "streams")),
    **{("post", route): generates(dialect_of(route)) for route in DIALECTS},
    ("post", embeddings.ROUTE): Operation(
        "One vector for each input",
        embeddings.KEYS,
        embeddings.TABLE,
        embeddings.REQUIRED,
        errors=_BODY_ERRORS + _ENGINE_ERRORS,
    ),
    **dict.fromkeys(
        [("post", route) for route in rerank.ROUTES],
        Operation(
            "Documents by their relevance to a query",
            rerank.KEYS,
            rerank.TABLE,
            rerank.REQUIRED,
            errors=_BODY_ERRORS + _ENGINE_ERRORS,
        ),
    ),
    ("post", "/v1/messages/count_tokens"): _works_on_text(
        "How many tokens a message would have",
        ("input_tokens",),
        anthropic_messages.COUNTED,
        *anthropic_messages.COUNTED_REQUIRED,
    )._replace(error=_MESSAGES_ERROR, auth_error=_MESSAGES_ERROR),
    ("post", "/tokenize"): _works_on_text(
        "Text to token ids", ("tokens", "count", "max_model_len"), worker.TOKENIZE
    ),
    ("post", "/detokenize"): _works_on_text(
        "Token ids to text", ("content", "prompt"), worker.DETOKENIZE, "tokens"
    ),
    ("post", "/apply-template"): _works_on_text(
        "The text of a conversation", ("prompt",), worker.APPLY_TEMPLATE, "messages"
    ),
    ("post", "/v1/responses/input_tokens"): Operation(
        "The length of a prompt",
        ("object", "input_tokens"),
        openai_responses.TABLE,
        openai_responses.REQUIRED,
        errors=_BODY_ERRORS,
    ),
    ("get", "/v1/responses/{id}"): _RESPONSE._replace(
        query=("stream", "starting_after"), media=(_JSON, _EVENTS), errors=(400, 404)
    ),
    ("delete", "/v1/responses/{id}"): Operation(
        "Stop and forget a response", ("id", "object", "deleted"), errors=(404,)
    ),
    ("post", "/v1/responses/{id}/cancel"): _RESPONSE._replace(summary="Stop a response"),
    ("get", "/v1/responses/{id}/input_items"): Operation(
        "What led to a response",
        ("object", "data", "has_more"),
        query=("limit", "order", "after"),
        errors=(400, 404),
    ),
    ("get", "/v1/streams/{id}"): Operation("How a stream stands", _STREAM, errors=(404,)),
    ("get", "/v1/streams/{id}/events"): Operation(
        "The events of a stream from a cursor on; 204 if it has ended there",
        query=("after", "view", "limit", "wait"),
        headers=("Last-Event-ID",),
        media=(_EVENTS, _JSON),
        errors=(400, 404),
    ),
    ("post", "/v1/streams/{id}/cancel"): Operation("Stop a stream", _STREAM, errors=(404,)),
    ("delete", "/v1/streams/{id}"): Operation("Stop and forget", status=204, media=()),
    ("get", "/v1/stream"): _BY_BYTE._replace(query=("conv_id", *_BY_BYTE.query)),
    ("get", "/v1/stream/{id}"): _BY_BYTE,
    ("delete", "/v1/stream"): _FORGET._replace(query=("conv_id",)),
    ("delete", "/v1/stream/{id}"): _FORGET,
    ("post", "/v1/streams/lookup"): Operation(
        "Which conversations have a stream",
        table=_LOOKUP,
        errors=(400, 408, 413, 415),
        error="ByteError",
    ),
}


def document(prefix: str = "") -> dict[str, Any]:
    """The OpenAPI document of a server whose routes lie below `prefix`."""
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), operation in OPERATIONS.items():
        paths.setdefault(path, {})[method] = _described(path, operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Headrace", "version": __version__},
        **({"servers": [{"url": prefix}]} if prefix else {}),
        "paths": paths,
        "components": {
            "schemas": _ERRORS | {"ByteError": _BYTE_ERROR},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
            },
        },
        "security": [{}, {"bearer": []}, {"header": []}],
    }


def _described(path: str, operation: Operation) -> dict[str, Any]:
    described: dict[str, Any] = {
        "summary": operation.summary,
        "parameters": _parameters(path, operation),
        "responses": _responses(path, operation),
    }
    if operation.table is not None:
        content = {_JSON: {"schema": _body(operation, operation.table)}}
        described["requestBody"] = {"required": True, "content": content}
    return described


def _parameters(path: str, operation: Operation) -> list[dict[str, Any]]:
    string = {"type": "string"}
    inside = [{"name": "id", "in": "path", "required": True, "schema": string}]
    query = [{"name": name, "in": "query", "schema": string} for name in operation.query]
    headers = [{"name": name, "in": "header", "schema": string} for name in operation.headers]
    return (inside if "{id}" in path else []) + query + headers


def _body(operation: Operation, table: Mapping[str, Kind]) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    if 503 in operation.errors:
        properties |= {name: {"description": "No effect"} for name in NO_EFFECT}
        properties |= {
            name: {"description": "Not supported", "enum": [*_EMPTY, *neutral]}
            for name, neutral in UNSUPPORTED.items()
            if name not in table
        }
    properties |= {
        name: kind.schema() if name in operation.required else nullable(kind)
        for name, kind in table.items()
    }
    return {"type": "object", "properties": properties, "required": list(operation.required)}


def _responses(path: str, operation: Operation) -> dict[str, Any]:
    schemas: dict[str, Any] = {}  # an event stream has none: readers differ on what its value is
    if operation.keys:
        schemas[_JSON] = {"type": "object", "required": list(operation.keys)}
    content = {media: {"schema": schemas.get(media, {})} for media in operation.media}
    done = {"description": operation.summary, "content": content}
    responses: dict[str, Any] = {str(operation.status): done}
    if path.endswith("/events"):
        responses["204"] = {"description": "Nothing follows"}
    if "health" in path:  # needs no key, and says why not in the shape of its answer
        return responses | {str(status): done for status in operation.errors}
    if "{id}" in path:  # an id that no stream or model could have leads to no route
        responses["404"] = _refused("Error")
    for status in (*_AUTH_ERRORS, *operation.errors):
        own = operation.auth_error if status in _AUTH_ERRORS else operation.error
        responses[str(status)] = _refused(own)
    return responses


def _refused(error: str) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{error}"}
    return {"description": "Refused", "content": {_JSON: {"schema": schema}}}
