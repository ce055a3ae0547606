"""Builds the OpenAPI document from the table of routes and the tables that check fields."""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp

from headrace.gateway.auth import Auth
from headrace.protocols.dialect import DIALECTS, dialect_of
from headrace.protocols.fields.common import NO_EFFECT, UNSUPPORTED
from headrace.protocols.fields.kinds import Kind, nullable
from headrace_common.version import __version__

if TYPE_CHECKING:
    from headrace.gateway.routes import Endpoints

_EMPTY: tuple[Any, ...] = (None, "", [], {})
_AUTH_ERRORS = (401, 403)
JSON, EVENTS = "application/json", "text/event-stream"
_FORMS = {route: dialect_of(route).ERRORS.SCHEMA for route in DIALECTS}
_ERRORS = {schema["title"]: schema for schema in _FORMS.values()}
EITHER_ERROR = "EitherError"
"""The schema of refusals on routes that belong to both OpenAI's and Anthropic's APIs."""

_EITHER = {
    "anyOf": [{"$ref": f"#/components/schemas/{name}"} for name in ("Error", "MessagesError")]
}
_BYTE_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "object", "required": ["code", "message", "type"]}},
}


Endpoint = Callable[[Request], Awaitable[ASGIApp]]
Guard = Callable[[Auth, Headers], None] | None
"""Raises RequestError if the client's headers have no key for a route. None: needs no key."""


class Operation(NamedTuple):
    """Describes one method of one path.

    `keys` are the keys that the JSON answer always has. If `reads_common_fields`, the body can
    also contain generation fields that are not in `table`. Of these fields, a field without an
    effect is accepted, and an unsupported field is refused. `endpoint` selects the method of
    Endpoints that answers, after the check by `guard`.
    """

    method: str
    path: str
    guard: Guard
    endpoint: Callable[["Endpoints"], Endpoint]
    summary: str
    keys: tuple[str, ...] = ()
    table: Mapping[str, Kind] | None = None
    required: tuple[str, ...] = ()
    reads_common_fields: bool = False
    query: tuple[str, ...] = ()
    headers: tuple[str, ...] = ()
    status: int = 200
    media: tuple[str, ...] = (JSON,)
    errors: tuple[int, ...] = ()
    # Names of the schemas of refusals. `auth_error` is for a missing or wrong key.
    error: str = "Error"
    auth_error: str = "Error"


def document(operations: Iterable[Operation], prefix: str = "") -> dict[str, Any]:
    """Return the OpenAPI document of a server whose routes are below `prefix`."""
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        path = operation.path.replace(":path", "")
        paths.setdefault(path, {})[operation.method] = _described(path, operation)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Headrace", "version": __version__},
        **({"servers": [{"url": prefix}]} if prefix else {}),
        "paths": paths,
        "components": {
            "schemas": _ERRORS | {"ByteError": _BYTE_ERROR, EITHER_ERROR: _EITHER},
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
        content = {JSON: {"schema": _body(operation, operation.table)}}
        described["requestBody"] = {"required": True, "content": content}
    return described


def _parameters(path: str, operation: Operation) -> list[dict[str, Any]]:
    string = {"type": "string"}
    inside = [
        {"name": name, "in": "path", "required": True, "schema": string}
        for name in ("id", "item")
        if f"{{{name}}}" in path
    ]
    query = [{"name": name, "in": "query", "schema": string} for name in operation.query]
    headers = [{"name": name, "in": "header", "schema": string} for name in operation.headers]
    return inside + query + headers


def _body(operation: Operation, table: Mapping[str, Kind]) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    if operation.reads_common_fields:
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
    # Event streams get no schema, because OpenAPI tools disagree on how to describe them.
    schemas: dict[str, Any] = {}
    if operation.keys:
        schemas[JSON] = {"type": "object", "required": list(operation.keys)}
    content = {media: {"schema": schemas.get(media, {})} for media in operation.media}
    done = {"description": operation.summary, "content": content}
    responses: dict[str, Any] = {str(operation.status): done}
    if path.endswith("/events"):
        responses["204"] = {"description": "The stream has ended at this cursor"}
    # A health route needs no key, and a refusal has the same format as the answer.
    if "health" in path or path == "/ping":
        return responses | {str(status): done for status in operation.errors}
    # If the path contains an id that no stream or model can have, no route matches. So this 404
    # has the common schema.
    if "{id}" in path:
        responses["404"] = _refused("Error")
    for status in (*_AUTH_ERRORS, *operation.errors):
        own = operation.auth_error if status in _AUTH_ERRORS else operation.error
        responses[str(status)] = _refused(own)
    return responses


def _refused(error: str) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{error}"}
    return {"description": "Refused", "content": {JSON: {"schema": schema}}}
