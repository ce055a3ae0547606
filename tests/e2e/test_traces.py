"""Tests of the OpenTelemetry spans that a real server sends to a collector."""

import json
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes

from tests.e2e.test_models import LIMIT_S
from tools.harness.collectors import Collector, collector, values
from tools.harness.eventually import eventually
from tools.harness.servers import ServerProcess, running_server

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = {"traceparent": f"00-{TRACE}-{SPAN}-01"}
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": 20}
FLAGS = ("--state-dir", "none", "--threads", "1", "--max-model-len", "512")


@pytest.fixture(scope="module")
def there() -> Iterator[Collector]:
    with collector() as running:
        yield running


@pytest.fixture(scope="module")
def server(there: Collector) -> Iterator[ServerProcess]:
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": there.url, "OTEL_SERVICE_NAME": "mine"}
    with running_server(*FLAGS, environment=environment) as running:
        yield running


def post(url: str, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    return httpx.post(f"{url}{path}", json=body, headers=headers, timeout=LIMIT_S)


def span_of(there: Collector, request_id: str) -> Any:
    """Wait for the only span of the request and return it."""

    def found() -> list[Any]:
        spans = list(there.spans)
        return [it for it in spans if values(it.attributes)["headrace.request_id"] == request_id]

    eventually(lambda: bool(found()), LIMIT_S)
    (span,) = found()
    return span


def test_a_request_is_one_span_in_the_trace_of_its_client(
    server: ServerProcess, there: Collector
) -> None:
    headers = PARENT | {"X-Request-Id": "first"}
    body = post(server.url, "/v1/chat/completions", CHAT, **headers).json()
    span = span_of(there, "first")
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, SPAN)
    assert span.name == "chat headrace-mini" and there.resources[-1]["service.name"] == "mine"
    attributes, usage = values(span.attributes), body["usage"]
    assert attributes["http.route"] == "/v1/chat/completions"
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.request.model"] == "headrace-mini"
    assert attributes["gen_ai.request.max_tokens"] == 20
    assert attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert attributes["gen_ai.response.finish_reasons"] == [body["choices"][0]["finish_reason"]]
    assert 0 < attributes["headrace.decode_steps"] <= usage["completion_tokens"]
    assert attributes["headrace.prompt_steps"] >= 1
    assert attributes["headrace.ingestion.strategy"] == "native-text"
    assert attributes["headrace.ingestion.prompt_tokens"] == usage["prompt_tokens"]
    seconds = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
    assert 0 < attributes["gen_ai.response.time_to_first_chunk"] <= seconds < LIMIT_S
    moments = [event.time_unix_nano for event in span.events]
    assert [event.name for event in span.events] == [
        "headrace.prompt_began",
        "headrace.prompt_read",
        "headrace.first_token",
    ]
    assert moments == sorted(moments) and span.start_time_unix_nano <= moments[0]
    known = {value for value in vars(gen_ai_attributes).values() if isinstance(value, str)}
    assert {name for name in attributes if name.startswith("gen_ai.")} <= known
    assert "Hello" not in str(span) and body["id"] not in str(span)


def test_streams_errors_and_embeddings_have_spans(server: ServerProcess, there: Collector) -> None:
    post(server.url, "/v1/chat/completions", CHAT | {"stream": True}, **{"X-Request-Id": "stream"})
    assert values(span_of(there, "stream").attributes)["gen_ai.usage.output_tokens"] > 0
    refused = CHAT | {"model": "nobody"}
    post(server.url, "/v1/chat/completions", refused, **{"X-Request-Id": "refused"})
    span = span_of(there, "refused")
    attributes = values(span.attributes)
    assert (span.name, attributes["error.type"]) == ("POST /v1/chat/completions", "model_not_found")
    assert (attributes["http.response.status_code"], span.status.code) == (404, 2)
    asked = {"input": "one two", "model": "headrace-mini"}
    post(server.url, "/v1/embeddings", asked, **{"X-Request-Id": "vector"})
    attributes = values(span_of(there, "vector").attributes)
    assert (
        attributes["gen_ai.operation.name"] == "embeddings"
        and attributes["gen_ai.usage.input_tokens"] > 0
    )


def test_a_hanging_collector_delays_neither_streams_nor_the_shutdown(
    server: ServerProcess, there: Collector
) -> None:
    alone = post(server.url, "/v1/chat/completions", CHAT).json()["choices"][0]["message"]

    def text(_: int) -> str:
        answer = post(server.url, "/v1/chat/completions", CHAT | {"stream": True})
        lines = [it.removeprefix("data: ") for it in answer.text.splitlines() if "data: {" in it]
        deltas = [json.loads(it)["choices"][0]["delta"] for it in lines]
        return "".join(delta.get("content") or "" for delta in deltas)

    there.answers.clear()
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(text, range(40))) == {alone["content"]}
    began = time.monotonic()
    assert server.stop(signal.SIGTERM) == 0
    assert time.monotonic() - began < 30
