import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.testclient import TestClient

from headrace.batches.folder import temporary_batch_store
from headrace.gateway.auth import Auth
from headrace.gateway.realtime import _FIELDS, MAX_COMMAS, _cursor, fields_of, text_of
from headrace.server import build_gateway
from headrace_common.config.settings import HttpConfig, ServerConfig
from headrace_common.errors import RequestError
from tests.gateway.builders import FakeGeneration, app_of


def test_a_frame_keeps_only_its_known_fields() -> None:
    known = {"type": "request", "id": None, "body": {"prompt": "é"}}
    unknown = {str(number): [number, {}] for number in range(1000)}
    fields = fields_of({"type": "websocket.receive", "text": json.dumps(known | unknown)})
    assert {name: json.loads(bytes(raw)) for name, raw in fields.items()} == known
    assert text_of(fields, "type", 64) == "request"
    assert text_of(fields, "id", 64) is None is text_of(fields, "route", 64)
    every = dict.fromkeys(_FIELDS, "x")
    assert len(fields_of({"type": "websocket.receive", "text": json.dumps(every)})) == len(_FIELDS)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": }', '{"a": ' + "[" * 100_000, "\ud800"])
def test_a_frame_that_is_not_a_json_object_is_refused(text: str) -> None:
    with pytest.raises(RequestError) as refused:
        fields_of({"type": "websocket.receive", "text": text})
    assert refused.value.code == "invalid_json"


def test_a_frame_with_too_many_values_is_refused_before_parsing() -> None:
    text = '{"type": "request", "body": [' + "1," * (MAX_COMMAS + 1) + "1]}"
    with pytest.raises(RequestError, match="commas") as refused:
        fields_of({"type": "websocket.receive", "text": text})
    assert refused.value.code == "request_too_large"


@pytest.mark.parametrize(
    ("offered", "chosen"),
    [
        (["realtime", "openai-insecure-api-key.k", "openai-beta.realtime-v1"], "realtime"),
        (["openai-insecure-api-key.k"], None),
        (["other", "openai-insecure-api-key.k"], None),
    ],
)
def test_a_key_sent_as_a_subprotocol_is_accepted_but_not_echoed(
    offered: list[str], chosen: str | None
) -> None:
    config = ServerConfig(http=HttpConfig(api_key=("k",)))
    client = TestClient(app_of(FakeGeneration(), config), base_url="http://localhost")
    with client.websocket_connect("/v1/realtime-text", offered) as socket:
        assert socket.accepted_subprotocol == chosen
        socket.send_text('{"type": "request"}')  # refused for its lack of an id, not for the key
        assert socket.receive_json()["error"]["param"] == "id"


def test_a_wrong_key_sent_as_a_subprotocol_is_refused() -> None:
    config = ServerConfig(http=HttpConfig(api_key=("k",)))
    client = TestClient(app_of(FakeGeneration(), config), base_url="http://localhost")
    offered = ["realtime", "openai-insecure-api-key.x"]
    with client.websocket_connect("/v1/realtime-text", offered) as socket:
        socket.send_text('{"type": "request"}')
        assert socket.receive_json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("most", [9, None])
def test_a_text_that_is_too_long_is_refused_before_it_is_decoded(most: int | None) -> None:
    undecodable = msgspec.Raw(b'"' + b"\\q" * 99_999 + b'"')
    with pytest.raises(RequestError) as refused:
        text_of({"id": undecodable}, "id", most)
    assert refused.value.code == "invalid_value" and "characters" in str(refused.value)


@pytest.mark.parametrize(
    ("sent", "cursor"),
    [("5", "5"), ('"5"', "5"), ('"a:5"', "a:5"), ('""', ""), ("null", None), ('"\\u0035"', "5")],
)
def test_a_cursor_is_a_string_or_a_number(sent: str, cursor: str | None) -> None:
    assert _cursor({"after": msgspec.Raw(sent.encode())}) == cursor


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (b'"' + b"\\q" * 99_999 + b'"', "invalid_value"),
        (b"9" * 99_999, "invalid_value"),
        (b"9" * 16, "invalid_type"),
        (b"{}", "invalid_type"),
        (b'"\\ud800"', "invalid_type"),
    ],
)
def test_a_cursor_of_another_type_or_length_is_refused(sent: bytes, code: str) -> None:
    with pytest.raises(RequestError) as refused:
        _cursor({"after": msgspec.Raw(sent)})
    assert (refused.value.code, refused.value.param) == (code, "after")


def test_the_length_limit_counts_characters_and_not_escapes() -> None:
    escaped = msgspec.Raw(b'"' + b"\\ud83d\\ude00" * 9 + b'"')
    assert text_of({"id": escaped}, "id", 9) == "\U0001f600" * 9


def test_a_revoked_key_is_refused_on_an_open_socket(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n")
    config = ServerConfig(http=HttpConfig(api_key_file=str(file)))
    auth = Auth(config.http)
    generation: Any = FakeGeneration()
    app = build_gateway(generation, config, temporary_batch_store(), auth).app
    client = TestClient(app, base_url="http://localhost")
    with client.websocket_connect("/v1/realtime-text", headers={"x-api-key": "one"}) as socket:
        for code in ("missing_required_parameter", "invalid_api_key"):
            socket.send_text('{"type": "request", "id": "a"}')
            assert json.loads(socket.receive_text())["error"]["code"] == code
            file.write_text("two\n")
            auth.reload()
