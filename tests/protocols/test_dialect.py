"""Tests that shared code assumes nothing that is true only for OpenAI's dialects."""

from types import SimpleNamespace
from typing import Any, get_args

import pytest

from headrace.gateway import openapi, routes
from headrace.protocols.dialect import dialect_at, dialect_of
from headrace.protocols.fields.common import COMMON, TokenIds
from headrace.protocols.framing import SSE
from headrace.protocols.openai import chat as openai_chat
from headrace_common.errors import RequestError
from headrace_common.request import Ids, Prompt
from headrace_common.worker_jobs import AnyJob
from tests.gateway.builders import parsed

ERRORS = SimpleNamespace(SCHEMA={"title": "ToyError"}, status=lambda error: error.kind.status)


class Toy(SimpleNamespace):
    """A fake dialect with the attributes that parsing a body reads."""

    SUMMARY, REQUIRED, KEYS, ERRORS = "Toy", ("text",), ("text",), ERRORS
    FRAMING = SSE
    TABLE = {"text": TokenIds(), **COMMON}
    IN_PROMPTS = frozenset({"text"})

    def read(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"text": tuple(body["text"])}

    def to_prompts(self, fields: dict[str, Any]) -> tuple[Prompt, ...]:
        return (Ids(fields["text"]),)


def test_an_invalid_id_is_named_by_its_field() -> None:
    with pytest.raises(RequestError) as refused:
        parsed(Toy(), {"text": [1, 256, 2]})  # type: ignore[arg-type]
    assert refused.value.param == "text[1]"


def test_the_openapi_document_has_the_errors_of_each_dialect() -> None:
    toy = routes.generation_route("/v1/toy", Toy())  # type: ignore[arg-type]
    responses = openapi.document([toy])["paths"]["/v1/toy"]["post"]["responses"]
    schemas = [
        response["content"]["application/json"]["schema"]
        for status, response in responses.items()
        if status != "200"
    ]
    assert schemas == [{"$ref": "#/components/schemas/ToyError"}] * len(schemas) != []


def test_a_field_that_a_dialect_takes_is_not_shown_as_unsupported() -> None:
    operation = openapi.document(routes.ROUTES)["paths"][openai_chat.ROUTE]["post"]
    body = operation["requestBody"]["content"]["application/json"]["schema"]["properties"]
    assert (
        "description" not in body["tools"] and body["documents"]["description"] == "Not supported"
    )


def test_shortening_a_path_takes_linear_time() -> None:
    class Counted(str):
        """Counts the characters that are read to shorten it."""

        read = 0

        def __getitem__(self, key: Any) -> "Counted":
            return Counted(str.__getitem__(self, key))

        def rpartition(self, sep: str) -> Any:
            Counted.read += len(self)
            before, found, after = str.rpartition(self, sep)
            return Counted(before), found, after

    assert dialect_at(Counted("/v1/messages" + "/a" * 20_000)) is dialect_at("/v1/messages")
    assert Counted.read < 100_000


def test_each_job_of_a_dialect_names_a_dialect_that_executes_jobs() -> None:
    routes_of_jobs = {job.dialect for job in get_args(AnyJob)} - {None}
    assert routes_of_jobs == {"/v1/messages", "/v1/responses"}
    assert all(callable(getattr(dialect_of(route), "do", None)) for route in routes_of_jobs)
