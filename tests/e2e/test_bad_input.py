"""Tests of malformed requests: each gets a proper error, and the server keeps working."""

import json
import socket
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tools.harness.servers import ServerProcess

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}


@pytest.fixture(autouse=True)
def check_server_still_generates(server: ServerProcess) -> Any:
    """Check after each of these tests that the server still generates."""
    yield
    body = {"prompt": "Once", "max_tokens": 2}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30)
    assert answer.json()["usage"]["completion_tokens"] >= 1


def send(server: ServerProcess, raw: bytes) -> bytes:
    """Send raw bytes; return the answer up to the end or to 2 s of silence."""
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
        connection.sendall(raw)
        connection.settimeout(2)
        answer = b""
        try:
            while part := connection.recv(65536):
                answer += part
        except (TimeoutError, ConnectionResetError):
            pass
        return answer


def post(server: ServerProcess, body: bytes | dict[str, Any], path: str = CHAT) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    return httpx.post(f"{server.url}{path}", content=content, headers=headers, timeout=30)


def code_of(response: httpx.Response) -> tuple[int, str]:
    assert response.headers["x-should-retry"] == "false"
    return response.status_code, response.json()["error"]["code"]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"nonsense",
        b"\xff\xfe{}",
        b"\xef\xbb\xbf{}",
        b'{"a":"\\ud800"}',
        b'{"a":NaN}',
        b"[" * 500_000,
        b'{"a":' * 100_000,
        b'{"messages":' + b"9" * 5000 + b"}",
    ],
    ids=range(10),
)
def test_invalid_json_is_a_400(server: ServerProcess, body: bytes) -> None:
    assert code_of(post(server, body)) == (400, "invalid_json")


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": "hi"},
        {"messages": [[]]},
        {"messages": [USER], "stop": [{}]},
        {"messages": [USER], "max_tokens": "many"},
        {"messages": [USER], "stream": "yes"},
        {"messages": [USER], "chat_template_kwargs": {"messages": 1}},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
    ],
)
def test_an_invalid_body_is_a_400_with_a_message(server: ServerProcess, body: Any) -> None:
    response = post(server, body)
    assert response.status_code == 400
    assert response.json()["error"]["message"]


def test_extreme_values_in_a_valid_body_never_cause_a_500(server: ServerProcess) -> None:
    function = {"name": "f", "arguments": "[" * 200_000}
    called = {"role": "assistant", "tool_calls": [{"function": function}]}
    refused = post(server, {"messages": [USER, called], "max_tokens": 1})
    assert code_of(refused) == (400, "context_length_exceeded")
    least = {"messages": [USER], "max_tokens": 2, "repetition_penalty": 1e-38}
    assert post(server, least).status_code == 200
    beyond = {"messages": [USER], "max_tokens": 2, "chat_template_kwargs": {"x": 1 << 64}}
    assert post(server, beyond).status_code == 200


def test_a_form_post_is_a_415(server: ServerProcess) -> None:
    response = httpx.post(f"{server.url}{CHAT}", data={"messages": "hi"})
    assert code_of(response) == (415, "unsupported_media_type")


def test_a_content_length_over_the_limit_is_refused_before_the_body_is_read(
    server: ServerProcess,
) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    answer = send(server, f"{head}Content-Length: 99999999999\r\n\r\n{{".encode())
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b'"code":"request_too_large"' in answer


def test_a_truncated_body_starts_no_request_and_logs_no_traceback(server: ServerProcess) -> None:
    address = urlsplit(server.url)
    for _ in range(20):
        with socket.create_connection((address.hostname, address.port)) as connection:
            head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            connection.sendall(f'{head}Content-Length: 100\r\n\r\n{{"mess'.encode())
    state = httpx.get(f"{server.url}/manage/state").json()
    assert state["running"] == state["waiting"]["requests"] == 0
    assert not any("Traceback" in line for line in server.lines)


@pytest.mark.parametrize(
    "raw",
    [
        b"\x00\x01\x02\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 200_000 + b"\r\n\r\n",
    ],
)
def test_malformed_http_never_causes_a_500(server: ServerProcess, raw: bytes) -> None:
    assert b" 500 " not in send(server, raw)


def test_a_foreign_origin_or_host_header_is_forbidden(server: ServerProcess) -> None:
    body, evil = {"messages": [USER]}, {"Origin": "https://evil.example"}
    response = httpx.post(f"{server.url}{CHAT}", json=body, headers=evil)
    assert code_of(response) == (403, "forbidden")
    assert code_of(httpx.get(f"{server.url}/props", headers={"Host": "evil.example"}))[0] == 403


def test_an_unknown_route_or_method_has_a_json_error(server: ServerProcess) -> None:
    for path in ("/v1", "/v1/chat/completions/x", "/../etc/passwd", "/%2e%2e/x"):
        assert code_of(httpx.get(server.url + path)) == (404, "route_not_found")
    response = httpx.delete(f"{server.url}{CHAT}")
    assert code_of(response) == (405, "method_not_allowed")
    assert response.headers["allow"] == "POST"


def test_odd_but_valid_text_is_answered(server: ServerProcess) -> None:
    for text in ("\x00", "\x7f\u2028\ufeff", "\N{GRINNING FACE}" * 50, "<|im_end|>" * 5, " "):
        body = {"prompt": text, "max_tokens": 2, "echo": True, "logprobs": 1}
        response = post(server, body, "/v1/completions")
        assert response.status_code == 200, response.text
        assert response.json()["choices"][0]["logprobs"]["tokens"]
