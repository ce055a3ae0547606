"""The OpenAPI document, made of the table of routes and of the tables that check fields."""

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.gateway.auth import Auth, Endpoint
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
"""The schema of refusals by routes that OpenAI's and Anthropic's APIs have in common."""

_EITHER = {
    "anyOf": [{"$ref": f"#/components/schemas/{name}"} for name in ("Error", "MessagesError")]
}
_BYTE_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "object", "required": ["code", "message", "type"]}},
}


class Operation(NamedTuple):
    """One method of one path. `keys` are those its JSON answer always has.

    `reads_common_fields`: beside `table` it knows the fields of generation that have no effect
    here, and refuses those that are not supported.
    `endpoint` finds what answers among the Endpoints, and `guard` lets requests in or not.
    """

    method: str
    path: str
    guard: Callable[[Auth, Endpoint], Endpoint]
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
    error: str = "Error"  # the schema of refusals
    auth_error: str = "Error"


def document(operations: Iterable[Operation], prefix: str = "") -> dict[str, Any]:
    """The OpenAPI document of a server whose routes lie below `prefix`."""
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
    inside = [{"name": "id", "in": "path", "required": True, "schema": string}]
    query = [{"name": name, "in": "query", "schema": string} for name in operation.query]
    headers = [{"name": name, "in": "header", "schema": string} for name in operation.headers]
    return (inside if "{id}" in path else []) + query + headers


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
    schemas: dict[str, Any] = {}  # an event stream has none: readers differ on what its value is
    if operation.keys:
        schemas[JSON] = {"type": "object", "required": list(operation.keys)}
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
    return {"description": "Refused", "content": {JSON: {"schema": schema}}}
