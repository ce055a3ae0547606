"""Tests the OpenAPI document against the app: same routes, and no body causes a 5xx."""

from typing import Any

import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)
from starlette.routing import Route

from headrace.gateway.openapi import document
from headrace.gateway.routes import ROUTES
from headrace.streams.events import Finish, Timings, Usage
from headrace_common.config.settings import HttpConfig, ServerConfig
from headrace_common.errors import KINDS
from tests.gateway.builders import FakeGeneration, app_of, ended, tokens

FINISH = Finish(seq=0, at_ms=0, ends=(ended().end,), usage=Usage(2, 1), timings=Timings())
GENERATION = FakeGeneration(tokens("Hi", 5), ended(), FINISH)
CONFIG = ServerConfig(http=HttpConfig(allowed_host=("testserver",)))
APP = app_of(GENERATION, CONFIG)
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
    unsupported_method,
]

MANY = 1000


@schemathesis.hook
def before_load_schema(context: Any, raw_schema: dict[str, Any]) -> None:
    """Drop limits that only a body of tens of megabytes could exceed."""
    forget_large_limits(raw_schema)


def forget_large_limits(schema: Any) -> None:
    values = list(schema.values()) if isinstance(schema, dict) else schema
    if isinstance(schema, dict) and schema.get("maxItems", 0) > MANY:
        del schema["maxItems"]
    for value in values if isinstance(values, list) else ():
        forget_large_limits(value)


schema = schemathesis.openapi.from_asgi("/openapi.json", APP)
schema = schema.exclude(path=["/manage/stream", "/models/sse"])  # they have no end
schema.config.phases.coverage.enabled = False  # it would send ten thousand messages at a time


def test_the_document_describes_exactly_the_existing_routes() -> None:
    routes = {
        (route.path.replace(":path", ""), method.lower())
        for route in APP.routes
        if isinstance(route, Route) and route.include_in_schema
        for method in (route.methods or {"GET"}) - {"HEAD"}
    }
    described = {
        (path, method) for path, item in document(ROUTES)["paths"].items() for method in item
    }
    assert routes == described


def test_every_error_code_is_described() -> None:
    error = document(ROUTES)["components"]["schemas"]["Error"]["properties"]["error"]
    assert set(error["properties"]["code"]["enum"]) == set(KINDS)


@schema.parametrize()
@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_body_breaks_a_route(case: Any) -> None:
    case.call_and_validate(checks=CHECKS)


def test_only_routes_that_read_the_fields_of_generation_list_them() -> None:
    paths = document(ROUTES)["paths"]
    fields = {
        path: set(operation["requestBody"]["content"]["application/json"]["schema"]["properties"])
        for path, operations in paths.items()
        for operation in operations.values()
        if "requestBody" in operation
    }
    having = {path for path, names in fields.items() if "bad_words" in names}
    assert fields["/v1/load_lora_adapter"] == {"lora_name", "lora_path", "base_model_name"}
    assert {"/v1/chat/completions", "/v1/embeddings", "/api/embed", "/rerank"} <= having
    assert not having & {"/v1/batches", "/v1/messages/batches", "/models/load", "/manage/desired"}
