import asyncio

import pytest
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect

from headrace.core.errors import RequestError
from headrace.gateway import bodies


def nested(depth: int) -> bytes:
    return b'{"a":' + b"[" * (depth - 1) + b"]" * (depth - 1) + b"}"


def refusal(body: bytes) -> RequestError:
    with pytest.raises(RequestError) as caught:
        bodies.decode(body)
    assert caught.value.code == "invalid_json"
    return caught.value


def read(
    *parts: bytes, content_type: str = "application/json", length: int | None = None
) -> object:
    messages = [{"type": "http.request", "body": part, "more_body": True} for part in parts]
    if messages:
        messages[-1]["more_body"] = False
    messages.append({"type": "http.disconnect"})

    async def receive() -> dict[str, object]:
        return messages.pop(0)

    headers = {"content-type": content_type}
    if length is not None:
        headers["content-length"] = str(length)
    return asyncio.run(bodies.read_json(Headers(headers), receive, max_bytes=20))


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"{} x",
        b"[]",
        b"null",
        b'{"a":NaN}',
        b'{"a":Infinity}',
        b'{"a":1e999}',
        b'{"a":' + b"9" * 400 + b"}",
        b'{"a":[{"b":-' + b"9" * 400 + b"}]}",
        b'{"a":"\xff"}',
        b'{"a":"\\ud800"}',
        b'{"a":"\\udc00\\ud800"}',
        b"\xef\xbb\xbf{}",
        b'{"a":"\t"}',
        b"{'a':1}",
    ],
)
def test_what_is_not_strict_json_is_refused(body: bytes) -> None:
    refusal(body)


def test_deep_nesting_is_a_400() -> None:
    assert bodies.decode(nested(64))
    assert "64 levels" in refusal(nested(65)).message
    assert "64 levels" in refusal(nested(200_000)).message


def test_of_equal_keys_the_last_counts() -> None:
    assert bodies.decode(b'{"a":1,"a":2}') == {"a": 2}


def test_a_surrogate_pair_is_one_character() -> None:
    assert bodies.decode(b'{"a":"\\ud83d\\ude00"}') == {"a": "\N{GRINNING FACE}"}


def test_a_body_in_parts_is_one_body() -> None:
    assert read(b'{"a"', b":1}") == {"a": 1}


@pytest.mark.parametrize(
    "content_type",
    ["", "text/plain", "application/x-www-form-urlencoded", "application/json; charset=latin-1"],
)
def test_a_form_post_is_a_415(content_type: str) -> None:
    with pytest.raises(RequestError) as caught:
        read(b"{}", content_type=content_type)
    assert caught.value.kind.status == 415


def test_a_charset_of_utf8_is_fine() -> None:
    assert read(b"{}", content_type='Application/JSON; charset="UTF-8"') == {}


def test_a_large_body_is_refused_by_its_length_and_while_it_is_read() -> None:
    for parts, length in (((), 21), ((b" " * 15, b" " * 15), None)):
        with pytest.raises(RequestError) as caught:
            read(*parts, length=length)
        assert caught.value.kind.status == 413
        assert "20 bytes" in caught.value.message


def test_a_client_that_leaves_in_mid_body_gets_nothing() -> None:
    with pytest.raises(ClientDisconnect):
        read()


def test_a_body_that_stops_coming_is_a_408(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "PAUSE_S", 0.01)

    async def never() -> None:
        await asyncio.Event().wait()

    with pytest.raises(RequestError) as caught:
        headers = Headers({"content-type": "application/json"})
        asyncio.run(bodies.read_json(headers, never, 20))
    assert caught.value.kind.status == 408
