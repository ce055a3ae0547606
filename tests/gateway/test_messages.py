"""Tests Anthropic's dialect over HTTP: the shape of errors, token counts and resuming."""

import re
from typing import Any

import msgspec
import pytest
from starlette.testclient import TestClient

from headrace.streams.record import Names, Record
from headrace_common.config.settings import HttpConfig, ServerConfig, StreamConfig
from headrace_common.errors import RequestError
from headrace_common.pieces import REASONING, TOOL
from tests.gateway.builders import (
    FakeGeneration,
    OneStream,
    app_of,
    ended,
    ended_stream,
    error,
    log_of,
    make_record,
    make_request,
    piece,
    tokens,
)

PATH = "/v1/messages"
ASKED = {
    "model": "headrace-mini",
    "max_tokens": 16,
    "messages": [{"role": "user", "content": "hi"}],
}
SAID = (
    piece("Hm.", REASONING),
    tokens("Hï", 5),
    piece("", TOOL, 0, "add"),
    piece('{"a": 1}', TOOL, 0),
    ended("tool_calls"),
)


def client_of(generation: FakeGeneration | None = None, *keys: str) -> TestClient:
    config = ServerConfig(http=HttpConfig(api_key=keys))
    app = app_of(generation or FakeGeneration(*SAID), config)
    return TestClient(app, base_url="http://localhost", raise_server_exceptions=False)


def refused(response: Any) -> tuple[int, str, str]:
    body = response.json()
    assert list(body) == ["type", "error", "request_id"]
    assert body["type"] == "error"
    assert body["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    assert response.headers["x-should-retry"] in ("true", "false")
    return response.status_code, body["error"]["type"], body["error"]["code"]


def test_every_error_has_the_shape_of_anthropics_api() -> None:
    client, key = client_of(None, "k"), {"x-api-key": "k"}
    json_type = key | {"content-type": "application/json"}
    counted = f"{PATH}/count_tokens"
    assert [
        refused(client.post(PATH, json=ASKED)),
        refused(client.get(PATH, headers=key)),
        refused(client.post(f"{PATH}/others", json={}, headers=key)),
        refused(client.post(PATH, content=b"{", headers=json_type)),
        refused(client.post(PATH, json={}, headers=key)),
        refused(client.post(counted, json={}, headers=key)),
        refused(client.post(counted, json=ASKED | {"model": "x"}, headers=key)),
    ] == [
        (401, "authentication_error", "invalid_api_key"),
        (405, "invalid_request_error", "method_not_allowed"),
        (404, "not_found_error", "route_not_found"),
        (400, "invalid_request_error", "invalid_json"),
        (400, "invalid_request_error", "missing_required_parameter"),
        (400, "invalid_request_error", "missing_required_parameter"),
        (404, "not_found_error", "model_not_found"),
    ]


def test_a_full_queue_and_a_rate_limit_can_be_retried() -> None:
    generation = FakeGeneration()
    generation.refusal = RequestError("server_overloaded", "Full.", retry_after_s=2.5)
    response = client_of(generation).post(PATH, json=ASKED)
    assert refused(response) == (529, "overloaded_error", "server_overloaded")
    assert response.headers["x-should-retry"] == "true"
    assert response.headers["retry-after-ms"] == "2500"
    generation.refusal = RequestError("rate_limit_exceeded", "Later.", retry_after_s=3)
    response = client_of(generation).post(PATH, json=ASKED)
    assert refused(response) == (429, "rate_limit_error", "rate_limit_exceeded")
    assert response.headers["retry-after"] == "3"


def test_a_thread_stored_on_the_server_is_refused() -> None:
    body = ASKED | {"thread": {"type": "continue", "previous_message_id": "msg_0"}}
    response = client_of().post(PATH, json=body)
    assert refused(response) == (400, "invalid_request_error", "unsupported_parameter")
    details = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
    assert response.json()["error"]["details"] == details


def test_a_whole_answer_of_a_failed_stream_is_an_error() -> None:
    response = client_of(FakeGeneration(tokens("H", 5), error())).post(PATH, json=ASKED)
    assert refused(response) == (503, "overloaded_error", "engine_failed")


def test_count_tokens_counts_the_text_that_the_template_renders() -> None:
    body = {k: v for k, v in ASKED.items() if k != "max_tokens"}
    response = client_of().post(f"{PATH}/count_tokens?beta=true", json=body | {"system": "So."})
    assert response.json() == {"input_tokens": len("system: So.\nuser: hi\n")}
    assert response.headers["request-id"]


def test_ignored_fields_are_listed_in_a_header() -> None:
    generation = FakeGeneration(*log_of(_record(), *SAID)[1:])
    body = ASKED | {"context_management": {}, "cache_control": {}, "metadata": {}}
    response = client_of(generation).post(f"{PATH}?beta=true", json=body)
    assert response.headers["x-headrace-ignored"] == "context_management"
    assert response.json()["content"][1] == {"type": "text", "text": "Hï"}


def test_parts_that_the_model_cannot_see_are_listed_in_a_header() -> None:
    generation = FakeGeneration(*log_of(_record(), *SAID)[1:])
    hidden = {"type": "redacted_thinking", "data": "x"}
    turns = [
        *ASKED["messages"],  # type: ignore[misc]
        {"role": "assistant", "content": [hidden, {"type": "text", "text": "Yes."}]},
        {"role": "user", "content": "Go on."},
    ]
    search = {"type": "web_search_20250305", "name": "web_search"}
    body = ASKED | {"messages": turns, "tools": [search], "container": "c"}
    response = client_of(generation).post(PATH, json=body)
    named = "container, messages[1].content[0], tools[0]"
    assert (response.status_code, response.headers["x-headrace-ignored"]) == (200, named)
    counted = client_of().post(f"{PATH}/count_tokens", json=body)
    assert counted.json() == {"input_tokens": len("user: hi\nassistant: Yes.\nuser: Go on.\n")}
    assert counted.headers["x-headrace-ignored"] == named


def _record(conversation: str | None = None) -> Record:
    options = {"stream": True, "return_progress": True}
    record = make_record(make_request(PATH, response_options=options))
    if conversation is None:
        return record
    return msgspec.structs.replace(record, names=Names("", conversation))


@pytest.fixture(scope="module")
def kept() -> tuple[TestClient, bytes, str]:
    """Return a client, the whole body of a finished stream, and the path of its events."""
    record = _record("c")
    generation = FakeGeneration()
    generation.streams = OneStream(ended_stream(record, *SAID))
    client = client_of(generation)
    body = client.get("/v1/stream", params={"conv_id": "c"}).content
    return client, body, f"/v1/streams/{record.id}/events"


def test_a_stream_resumes_at_any_byte(kept: tuple[TestClient, bytes, str]) -> None:
    client, body, _ = kept
    assert body.endswith(b'\nevent: message_stop\ndata: {"type":"message_stop"}\n\n')
    for start in range(0, len(body), 7):
        rest = client.get("/v1/stream", params={"conv_id": "c", "from": str(start)}).content
        assert rest == body[start:]


def test_a_stream_resumes_after_any_event(kept: tuple[TestClient, bytes, str]) -> None:
    client, body, events = kept
    ids = list(re.finditer(rb"^id: (\S+)\nevent: \w+\ndata: .*\n\n", body, re.MULTILINE))
    assert b"".join(found[0] for found in ids) == body
    for found in ids[:-1]:
        rest = client.get(events, params={"view": "wire", "after": found[1].decode()})
        assert rest.content == body[found.end() :]


@pytest.mark.parametrize("keeps", [False, True])
def test_text_inserted_by_a_client_is_removed_unless_configured(
    caplog: pytest.LogCaptureFixture, keeps: bool
) -> None:
    streams = StreamConfig(inserted_texts="keep" if keeps else "leave-out")
    generation = FakeGeneration()
    generation.refusal = RequestError("server_overloaded", "It is full.")
    app = app_of(generation, ServerConfig(streams=streams))
    client, agent = TestClient(app, base_url="http://localhost"), {"user-agent": "claude-cli/2"}
    left = "<total_tokens>9 tokens left</total_tokens>"
    with caplog.at_level("INFO"):
        for _ in range(2):
            asked = ASKED | {"system": f"Be brief.\n\n{left}"}
            counted = client.post(f"{PATH}/count_tokens", json=asked, headers=agent).json()
            client.post(PATH, json=asked, headers=agent)
    plain = client.post(f"{PATH}/count_tokens", json=ASKED | {"system": "Be brief."}).json()
    assert (counted == plain) is not keeps
    told = [line for line in caplog.messages if "--inserted-texts keep" in line]
    assert len(told) == (not keeps) and all(left in line for line in told)
