"""Tests reading a stream by event: cursors, and other values of queries and headers."""

import asyncio
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.testclient import TestClient

from headrace.gateway import native_routes
from headrace_common.config.settings import HttpConfig, ServerConfig
from headrace_common.errors import RequestError
from tests.gateway.builders import (
    FakeGeneration,
    OneStream,
    app_of,
    ended,
    ended_stream,
    log_of,
    make_record,
    make_request,
    tokens,
)

RECORD = make_record(make_request(response_options={"stream": True, "include_usage": True}))
NUM_EVENTS = 4  # accepted, a token, an end, and the finish, which is two frames: usage and [DONE]
EVENTS = f"/v1/streams/{RECORD.id}/events"
JSON_PAGE = {"accept": "application/json"}


def app(*keys: str) -> Starlette:
    generation = FakeGeneration(*log_of(RECORD, tokens("Hi", 5), ended())[1:])
    generation.streams = OneStream(ended_stream(RECORD, tokens("Hi", 5), ended()))
    return app_of(generation, ServerConfig(http=HttpConfig(api_key=keys)))


def get(path: str, headers: dict[str, str] | None = None, **query: str) -> Any:
    client = TestClient(app(), base_url="http://localhost", raise_server_exceptions=False)
    return client.get(path, params=query, headers=headers)


@pytest.mark.parametrize("view", ["wire", "events"])
def test_a_cursor_at_the_last_frame_gets_204(view: str) -> None:
    assert get(EVENTS, view="wire").text.count("id: ") == NUM_EVENTS + 1
    assert get(EVENTS, view=view, after=f"{RECORD.id}:3.1").status_code == 204
    assert get(EVENTS, view=view, after="3").status_code == 204


def test_a_cursor_between_two_frames_returns_the_rest() -> None:
    assert get(EVENTS, view="wire", after="3.0").text.endswith(":3.1\ndata: [DONE]\n\n")
    assert get(EVENTS, after="3.0").text.startswith(f"id: {RECORD.id}:3\nevent: finish\n")
    page = get(EVENTS, JSON_PAGE, after="3.0").json()
    assert [event["kind"] for event in page["events"]] == ["finish"]


@pytest.mark.parametrize("cursor", ["3.2", "2.1", "0.7"])
def test_a_cursor_to_a_missing_frame_is_refused(cursor: str) -> None:
    refused = get(EVENTS, view="wire", after=cursor)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_cursor")


@pytest.mark.parametrize("limit", ["0", "1001", "-1", "\u0661", "1.0", "", "9" * 5000])
def test_an_invalid_limit_is_refused_with_the_valid_range(limit: str) -> None:
    error = get(EVENTS, JSON_PAGE, limit=limit).json()["error"]
    assert (error["code"], error["param"]) == ("invalid_value", "limit")
    assert "from 1 to 1000" in error["message"]


@pytest.mark.parametrize("wait", ["31", "-1", "\u0661", "1e1", "nan", "", "9" * 5000])
def test_an_invalid_wait_is_refused_with_the_valid_range(wait: str) -> None:
    error = get(EVENTS, JSON_PAGE, wait=wait).json()["error"]
    assert (error["code"], error["param"]) == ("invalid_value", "wait")
    assert "from 0 to 30" in error["message"]


def test_limits_and_waits_within_the_range_are_accepted() -> None:
    for query in ({"limit": "1", "wait": "0.25"}, {"limit": "1000", "wait": "30"}):
        page = get(EVENTS, JSON_PAGE, **query).json()
        assert len(page["events"]) == min(int(query["limit"]), NUM_EVENTS)


def test_a_large_page_ends_early_and_the_next_page_continues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native_routes, "_MAX_PAGE_BYTES", 10)
    seen, cursor, is_done = [], "", False
    while not is_done:
        page = get(EVENTS, JSON_PAGE, after=cursor).json()
        assert len(page["events"]) == 1
        seen.append(page["events"][0]["seq"])
        cursor, is_done = page["next"], page["done"]
    assert seen == list(range(NUM_EVENTS))


def test_the_state_of_a_stream_has_its_whole_answer() -> None:
    state = get(f"/v1/streams/{RECORD.id}").json()
    assert state["response"]["choices"][0]["message"]["content"] == "Hi"
    params = {"conv_id": "c", "from": str(state["total_bytes"])}
    assert get("/v1/stream", **params).content == b""


class BusyWork:
    async def do(self, *job: Any) -> Any:
        raise RequestError("server_overloaded", "All workers are busy.", retry_after_s=5)


def test_a_refused_lookup_has_a_retry_after_header() -> None:
    generation: Any = FakeGeneration()
    generation.work = BusyWork()
    client = TestClient(app_of(generation), base_url="http://localhost")
    refused = client.post("/v1/streams/lookup", json={})
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "5")


ROUTES = [
    ("GET", f"/v1/streams/{RECORD.id}"),
    ("GET", EVENTS),
    ("GET", "/v1/stream"),
    ("GET", "/v1/stream/a"),
    ("DELETE", "/v1/stream"),
    ("POST", "/v1/streams/lookup"),
    ("POST", f"/v1/streams/{RECORD.id}/cancel"),
    ("POST", "/v1/completions"),
    ("POST", "/tokenize"),
    ("GET", "/v1/models/x"),
]
QUERIES = ["after", "limit", "wait", "view", "from", "conv_id", "stream_id"]
HEADERS = [
    *("accept", "content-length", "content-type", "host", "origin", "authorization", "x-api-key"),
    *("idempotency-key", "last-event-id", "x-conversation-id", "x-request-id"),
]
NUMBERS = st.from_regex(r"[-+]?[0-9\u0660-\u0669]{0,30}(\.[0-9]{0,9})?(e[0-9])?", fullmatch=True)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | NUMBERS
RAW = st.binary(max_size=8) | NUMBERS.map(str.encode) | st.sampled_from([b"application/json"])


async def status_of(app: Starlette, route: tuple[str, str], query: bytes, headers: Any) -> int:
    method, path = route
    sent: list[Any] = []
    body = {"type": "http.request", "body": b'{"prompt": "hi"}', "more_body": False}
    incoming = [body]

    async def receive() -> Any:
        return incoming.pop() if incoming else await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": path, "query_string": query}
    scope |= {"headers": headers, "scheme": "http", "server": ("localhost", 80), "root_path": ""}
    await asyncio.wait_for(app(scope, receive, send), 2)
    assert sent[-1].get("more_body", False) is False
    status: int = sent[0]["status"]
    return status


@pytest.mark.parametrize("keys", [(), ("k",)])
@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(ROUTES),
    st.dictionaries(st.sampled_from(QUERIES), TEXTS, max_size=4),
    st.dictionaries(st.sampled_from(HEADERS), RAW, max_size=4),
)
@example(ROUTES[2], {"conv_id": "c"}, {"host": b"["})
@example(ROUTES[7], {}, {"host": b"[", "content-type": b"application/json"})
def test_no_query_or_header_causes_a_server_error(
    keys: tuple[str, ...], route: tuple[str, str], query: dict[str, str], raw: dict[str, bytes]
) -> None:
    line = "&".join(f"{name}={quote(value)}" for name, value in query.items()).encode()
    given = {"x-api-key": b"k", "host": b"localhost", "content-type": b"application/json"} | raw
    headers = [(name.encode(), value) for name, value in given.items()]
    assert asyncio.run(status_of(app(*keys), route, line, headers)) < 500
