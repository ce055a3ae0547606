"""Requests of a page of another origin, and what a browser lets that page see."""

from typing import Any

from starlette.testclient import TestClient

from headrace.config.settings import HttpConfig, ServerConfig
from headrace.gateway.app import create_app
from tests.gateway.builders import FakeGeneration

PAGE = {"origin": "https://app.example"}
PREFLIGHT = PAGE | {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,idempotency-key",
}


def client_of(*origins: str, **http: Any) -> TestClient:
    config = ServerConfig(http=HttpConfig(allowed_origins=origins, **http))
    return TestClient(create_app(FakeGeneration(), config), base_url="http://localhost")  # type: ignore[arg-type]


def test_a_preflight_is_answered_before_the_key() -> None:
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


def test_a_page_can_read_answers_and_errors() -> None:
    client = client_of("https://app.example", api_key=("k",))
    for headers, status in (({}, 401), ({"x-api-key": "k"}, 200)):
        answer = client.get("/v1/models", headers=PAGE | headers)
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
        assert "X-Stream-Id" in answer.headers["access-control-expose-headers"]
        assert "x-request-id" in answer.headers
    stranger = client.get("/v1/models", headers={"origin": "https://b.example", "x-api-key": "k"})
    assert "access-control-allow-origin" not in stranger.headers


def test_no_page_of_another_host_gets_a_socket_even_with_a_key() -> None:
    client = client_of("https://app.example", api_key=("k",))
    headers = {"origin": "https://b.example", "x-api-key": "k"}
    with client.websocket_connect("/v1/realtime-text", headers=headers) as socket:
        assert socket.receive_json()["error"]["code"] == "forbidden"
        assert socket.receive()["code"] == 1008


def test_without_the_flag_no_page_is_let_in() -> None:
    answer = client_of().options("/v1/chat/completions", headers=PREFLIGHT)
    assert answer.status_code == 405 and "access-control-allow-origin" not in answer.headers
    assert (
        client_of("*").get("/v1/models", headers=PAGE).headers["access-control-allow-origin"] == "*"
    )
