"""Tests requests from pages of another origin, and what a browser lets such a page read."""

from typing import Any

import pytest
from starlette.testclient import TestClient

from headrace_common.config.settings import HttpConfig, ServerConfig
from tests.gateway.builders import FakeGeneration, app_of

PAGE = {"origin": "https://app.example"}
PREFLIGHT = PAGE | {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,idempotency-key",
}


def client_of(*origins: str, **http: Any) -> TestClient:
    config = ServerConfig(http=HttpConfig(allowed_origins=origins, **http))
    return TestClient(app_of(FakeGeneration(), config), base_url="http://localhost")


def test_a_preflight_is_answered_without_a_key() -> None:
    client = client_of("https://app.example", api_key=("k",))
    answer = client.options("/v1/chat/completions", headers=PREFLIGHT | {"x-request-id": "mine"})
    assert answer.status_code == 200 and answer.headers["x-request-id"] == "mine"
    assert answer.headers["access-control-allow-origin"] == "https://app.example"
    assert "idempotency-key" in answer.headers["access-control-allow-headers"]
    assert "access-control-allow-credentials" not in answer.headers
    other = client.options(
        "/v1/chat/completions", headers=PREFLIGHT | {"origin": "https://b.example"}
    )
    assert other.status_code == 400 and "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize("allowed", ["https://app.example", "*"])
def test_an_allowed_public_page_may_reach_a_server_in_a_private_network(allowed: str) -> None:
    asked = PREFLIGHT | {"access-control-request-private-network": "true"}
    answer = client_of(allowed).options("/v1/models", headers=asked)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-private-network"] == "true"
    foreign = client_of("https://b.example").options("/v1/models", headers=asked)
    assert foreign.status_code == 400
    assert "access-control-allow-private-network" not in foreign.headers


def test_an_allowed_page_can_read_answers_and_errors() -> None:
    client = client_of("https://app.example", api_key=("k",))
    for headers, status in (({}, 401), ({"x-api-key": "k"}, 200)):
        answer = client.get("/v1/models", headers=PAGE | headers)
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        assert "X-Stream-Id" in answer.headers["access-control-expose-headers"]
        assert "x-request-id" in answer.headers
    stranger = client.get("/v1/models", headers={"origin": "https://b.example", "x-api-key": "k"})
    assert "access-control-allow-origin" not in stranger.headers


def test_a_page_of_another_origin_gets_no_web_socket_even_with_a_key() -> None:
    client = client_of("https://app.example", api_key=("k",))
    headers = {"origin": "https://b.example", "x-api-key": "k"}
    with client.websocket_connect("/v1/realtime-text", headers=headers) as socket:
        assert socket.receive_json()["error"]["code"] == "forbidden"
        assert socket.receive()["code"] == 1008


def test_cross_origin_access_requires_the_flag() -> None:
    answer = client_of().options("/v1/chat/completions", headers=PREFLIGHT)
    assert answer.status_code == 405 and "access-control-allow-origin" not in answer.headers
    assert (
        client_of("*").get("/v1/models", headers=PAGE).headers["access-control-allow-origin"] == "*"
    )


SIMPLE = [
    None,
    "text/plain",
    "application/x-www-form-urlencoded",
    "multipart/form-data; boundary=b",
]
"""Content types that a browser lets a page of any site send without a preflight."""


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize("content_type", SIMPLE)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/chat", "/v1/files", "/models/load"])
def test_a_page_of_another_origin_cannot_post_to_a_server_without_keys(
    host: str, content_type: str | None, path: str
) -> None:
    client = client_of("https://app.example", host=host)
    headers = {"content-type": content_type} if content_type else {}
    for origin in ("https://b.example", "null"):
        refused = client.post(path, content=b"{}", headers=headers | {"origin": origin})
        expected = (403,) if host == "127.0.0.1" else (403, 415)  # 415: of a type not taken here
        assert refused.status_code in expected
    for page in ({}, {"origin": "http://localhost:3000"}, PAGE):
        assert client.post(path, content=b"{}", headers=headers | page).status_code != 403


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/chat"])
def test_a_body_needs_no_content_type_and_ollama_routes_accept_that_of_curl(path: str) -> None:
    client = client_of()
    for headers in (
        {},
        {"content-type": ""},
        {"content-type": "application/x-www-form-urlencoded"},
    ):
        is_taken = path == "/api/chat" or not any(headers.values())
        answer = client.post(path, content=b'{"messages": 1}', headers=headers)
        assert answer.status_code == (400 if is_taken else 415), answer.text


def test_a_415_lists_the_supported_content_encodings() -> None:
    headers = {"content-type": "application/json", "content-encoding": "br"}
    for path in ("/v1/chat/completions", "/v1/messages", "/api/chat", "/tokenize"):
        refused = client_of().post(path, content=b"{}", headers=headers)
        assert refused.status_code == 415 and "Content-Encoding is br" in refused.text
        assert refused.headers["accept-encoding"] == "gzip, zstd, identity"
