"""Tests the Durable Streams protocol: offsets, long polls, SSE and refused queries."""

import json
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from headrace.gateway import durable_routes
from headrace_common.config.settings import HttpConfig, ServerConfig
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

RECORD = make_record(make_request())
TEXT = "Hi\r\nevent: control\r\ndata: {}"  # which must not look like an event
KINDS = ["accepted", "tokens", "tokens", "finish"]
URL = f"/v1/durable/{RECORD.id}"
END = f"{len(KINDS):016d}"


class Expired(OneStream):
    async def find(self, owner: str, by: object, suspended: bool = False) -> None:  # type: ignore[override]
        return None


def app(registry: type[OneStream] = OneStream) -> Starlette:
    generation = FakeGeneration(*log_of(RECORD, tokens(TEXT, 5), ended())[1:])
    generation.streams = registry(ended_stream(RECORD, tokens(TEXT, 5), ended()))
    return app_of(generation, ServerConfig(http=HttpConfig()))


def get(headers: dict[str, str] | None = None, method: str = "GET", **query: str) -> Any:
    client = TestClient(app(), base_url="http://localhost", raise_server_exceptions=False)
    return client.request(method, URL, params=query, headers=headers)


def test_a_closed_stream_can_be_read_from_any_offset() -> None:
    whole = get()
    assert [event["kind"] for event in whole.json()] == KINDS
    for start in range(len(KINDS) + 1):
        part = get(offset=f"{start:016d}")
        assert part.json() == whole.json()[start:]
        assert part.headers["stream-next-offset"] == END
        assert part.headers["stream-closed"] == part.headers["stream-up-to-date"] == "true"


def test_large_pages_end_early_and_only_the_last_has_stream_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(durable_routes, "_MAX_BYTES", 1)
    offset, seen = "-1", []
    while True:
        page = get(offset=offset)
        seen += page.json()
        offset = page.headers["stream-next-offset"]
        assert ("stream-closed" in page.headers) == (offset == END)
        if offset == END:
            break
    assert [event["seq"] for event in seen] == list(range(len(KINDS)))


def test_head_returns_the_end_offset_and_now_starts_there() -> None:
    head = get(method="HEAD")
    assert (head.content, head.headers["stream-next-offset"]) == (b"", END)
    assert head.headers["cache-control"] == "no-store"
    now = get(offset="now")
    assert (now.json(), now.headers["stream-next-offset"]) == ([], END)


def test_an_unchanged_page_is_answered_with_304() -> None:
    tag = get().headers["etag"]
    again = get({"if-none-match": tag})
    assert (again.status_code, again.content) == (304, b"")
    assert get({"if-none-match": tag}, offset=f"{1:016d}").status_code == 200


def test_a_long_poll_at_the_end_of_a_closed_stream_does_not_wait() -> None:
    done = get(offset=END, live="long-poll")
    assert (done.status_code, done.headers["stream-closed"]) == (204, "true")


def test_sse_ends_with_the_stream_and_text_cannot_forge_an_event() -> None:
    frames = get(offset="-1", live="sse").text.split("\n\n")
    assert [frame.partition("\n")[0] for frame in frames] == [
        "event: data",
        "event: control",
        "",
    ]
    events = json.loads(frames[0].partition("data:")[2])
    assert events[1]["pieces"][0]["text"] == TEXT
    assert json.loads(frames[1].partition("data:")[2]) == {
        "streamNextOffset": END,
        "streamClosed": True,
        "upToDate": True,
    }


@pytest.mark.parametrize(
    "query",
    [
        {"offset": ""},
        {"offset": "0,1"},
        {"offset": "7"},
        {"offset": "٠" * 16},
        {"offset": f"{9:016d}"},
        {"live": "sse"},
        {"live": "long-poll"},
        {"live": "forever", "offset": "-1"},
    ],
)
def test_an_invalid_offset_or_live_mode_is_refused(query: dict[str, str]) -> None:
    refused = get(**query)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid_value")


def test_a_returned_cursor_is_newer_than_the_clients() -> None:
    first = get(offset="-1", live="long-poll").headers["stream-cursor"]
    second = get(offset="-1", live="long-poll", cursor=first).headers["stream-cursor"]
    assert int(second) > int(first)


def test_resuming_a_deleted_stream_gets_410_instead_of_404() -> None:
    client = TestClient(app(Expired), base_url="http://localhost")
    assert client.get(URL).status_code == 404
    assert client.get(URL, params={"offset": END}).status_code == 410
