"""Wrong uses of the clients that need no server to be told."""

import asyncio
import socket
import threading
from typing import Any

import pytest

from headrace import AsyncClient, Client, ConfigError, HeadraceError, RequestFailed, Unreachable
from headrace.client.following import StreamFollower
from headrace.client.http import to_address
from tests.client.builders import STREAM, accepted, finish

KINDS = pytest.mark.parametrize("kind", [Client, AsyncClient])


@KINDS
@pytest.mark.parametrize(
    "given",
    [
        {"url": 9101},
        {"api_key": 5},
        {"patience_s": "x"},
        {"patience_s": float("nan")},
        {"patience_s": -1},
    ],
)
def test_a_wrong_type_is_named(kind: Any, given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(given))):
        kind(**given)


@KINDS
@pytest.mark.parametrize("url", ["localhost:8000", "http://127.0.0.1:9101", "http://[::1]"])
def test_no_proxy_is_used_for_this_machine(
    kind: Any, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:9")
    kind(url)
    # For another machine, httpx needs a package to use this proxy.
    with pytest.raises(ImportError, match="socksio"):
        kind("http://192.0.2.1:8000")


@KINDS
def test_what_is_no_stream_cannot_be_attached_to(kind: Any) -> None:
    for wrong in (5, "", None):
        with pytest.raises(RequestFailed, match="stream_id"):
            kind().attach(wrong)
    with pytest.raises(RequestFailed, match="after"):
        kind().attach("chatcmpl-1", after="x")


@KINDS
@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"temperature": float("nan")}, "temperature"),
        ({"logit_bias": {"5": float("inf")}}, "logit_bias.5"),
        ({"stop": ["a", float("nan")]}, r"stop\[1\]"),
    ],
)
def test_a_number_that_json_lacks_is_refused(kind: Any, fields: dict[str, Any], name: str) -> None:
    with pytest.raises(RequestFailed, match=f"{name} is .*finite"):
        kind().stream("hi", **fields)


@KINDS
def test_a_value_that_is_no_json_is_refused(kind: Any) -> None:
    with pytest.raises(RequestFailed, match="JSON"):
        kind().stream("hi", stop=object())


def test_a_closed_client_says_so() -> None:
    client = Client()
    stream = client.stream("hi")
    client.close()
    for call in (client.models, stream.answer, lambda: list(client.stream("hi"))):
        with pytest.raises(HeadraceError, match="was closed"):
            call()


async def test_a_closed_asynchronous_client_says_so() -> None:
    client = AsyncClient()
    await client.close()
    with pytest.raises(HeadraceError, match="was closed"):
        await client.models()
    with pytest.raises(HeadraceError, match="was closed"):
        await client.chat("hi")


def test_a_stream_that_was_read_is_not_read_again() -> None:
    follower = StreamFollower(None, STREAM, -1, 1.0)
    for event in follower.feed(accepted() + finish(1)):
        follower.check_unread()
        follower.applied(event)
    with pytest.raises(RequestFailed, match="attach"):
        follower.check_unread()


@pytest.mark.parametrize(
    "route", ["", "/", "/v1", "/v1/", "/v1/chat/completions", "/v1/models?x=1", "//v1/streams/a/"]
)
def test_a_pasted_route_is_trimmed(route: str) -> None:
    assert to_address(f"http://host:8000{route}") == "http://host:8000"
    assert to_address(f"http://host:8000/under{route}") == "http://host:8000/under"


@KINDS
def test_https_to_a_plain_server_is_told_what_to_write(kind: Any) -> None:
    def answer_plainly() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async def ask(client: AsyncClient) -> None:
        async with client:
            await client.models()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=answer_plainly, daemon=True).start()
        host = f"127.0.0.1:{listener.getsockname()[1]}"
        client = kind(f"https://{host}")
        with pytest.raises(Unreachable, match=f"write http://{host}"):
            client.models() if kind is Client else asyncio.run(ask(client))
