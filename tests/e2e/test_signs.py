"""Tests of keepalive events and progress while a prompt takes long."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tools.harness.servers import ServerProcess, running_server
from tools.harness.slow_engine import slow
from tools.harness.sse import data_in

PROMPT = " ".join(str(number) for number in range(250))
BODY = {
    "model": "headrace-mini",
    "max_tokens": 4,
    "stream": True,
    "messages": [{"role": "user", "content": PROMPT}],
}
LIMIT_S = 120


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    flags = ("headrace-mini", "--heartbeat-s", "1", "--threads", "1")
    with running_server(*flags, prefix=slow(6.0, "1.5")) as running:
        yield running


def test_messages_send_empty_deltas_and_pings_during_a_long_prompt(server: ServerProcess) -> None:
    answer = httpx.post(f"{server.url}/v1/messages", json=BODY, timeout=LIMIT_S)
    events = data_in(answer.content)
    begun = next(i for i, event in enumerate(events) if event["type"] == "content_block_start")
    empty = [e for e in events if e.get("delta", {}).get("text") == ""]
    assert begun and len(empty) >= 2 and any(event["type"] == "ping" for event in events)
    starts = [event for event in events if event["type"] == "content_block_start"]
    assert len(starts) == 1 and events[-1]["type"] == "message_stop"


def test_a_stream_with_keepalives_can_be_resumed_at_every_byte(server: ServerProcess) -> None:
    name = {"X-Conversation-Id": "slow"}
    # The prompt starts differently, so none of it is cached.
    asked = {**BODY, "messages": [{"role": "user", "content": "x " + PROMPT}]}
    whole = httpx.post(
        f"{server.url}/v1/messages", json=asked, headers=name, timeout=LIMIT_S
    ).content
    assert whole.count(b'"text":""') >= 2
    for start in range(0, len(whole), 97):
        at = {"conv_id": "slow", "from": start}
        assert httpx.get(f"{server.url}/v1/stream", params=at).content == whole[start:]


def test_a_retry_with_the_same_key_gets_the_same_content_blocks(server: ServerProcess) -> None:
    key = {"Idempotency-Key": "slow"}
    asked = {**BODY, "messages": [{"role": "user", "content": "y " + PROMPT}]}
    url = f"{server.url}/v1/messages"
    first = httpx.post(url, json=asked, headers=key, timeout=LIMIT_S)
    again = httpx.post(url, json=asked, headers=key, timeout=LIMIT_S)
    kept = [[e for e in data_in(one.content) if e["type"] != "ping"] for one in (first, again)]
    assert kept[0] == kept[1]


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_a_stream_with_progress_as_reasoning_can_be_resumed_at_every_byte(
    server: ServerProcess, route: str
) -> None:
    said = f"{route} {PROMPT}"
    asked: dict[str, Any] = {"model": "headrace-mini", "stream": True}
    asked |= {"return_progress": "reasoning"}
    turns = [{"role": "user", "content": said}]
    asked |= {"input": said} if route == "/v1/responses" else {"messages": turns, "max_tokens": 4}
    name = {"X-Conversation-Id": route}
    post = httpx.post(f"{server.url}{route}", json=asked, headers=name, timeout=LIMIT_S)
    whole = post.content
    assert "\u2063Processing the prompt: ".encode() in whole
    for start in range(0, len(whole), 997):
        at = {"conv_id": route, "from": start}
        assert httpx.get(f"{server.url}/v1/stream", params=at).content == whole[start:]
