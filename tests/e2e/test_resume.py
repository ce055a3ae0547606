"""Tests of resumed streams over HTTP: by event and byte, after disconnects, stops and kills."""

import contextlib
import json
import os
import resource
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.test_full_disk import full_disk
from tools.harness.eventually import eventually
from tools.harness.servers import ServerProcess, running_server
from tools.harness.sse import data_in, data_of

BODY = {"prompt": "Once upon a time", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
LONG = BODY | {"max_tokens": 1500, "stream": True}


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[ServerProcess]:
    with running_server(str(folder), "--threads", "1", "--linger-s", "5") as running:
        yield running


@pytest.fixture(scope="module")
def url(server: ServerProcess) -> str:
    return server.url


def post(url: str, body: dict[str, Any] = BODY, **headers: str) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60)


def names(text: str) -> dict[str, str]:
    return {"X-Conversation-Id": text}


def cut(url: str, num_bytes: int, body: dict[str, Any], headers: dict[str, str]) -> bytes:
    """Return the first bytes of a streamed answer and drop the connection."""
    got = b""
    with httpx.stream(
        "POST", f"{url}/v1/completions", json=body, headers=headers, timeout=60
    ) as answer:
        for piece in answer.iter_raw():
            got += piece
            if len(got) >= num_bytes:
                break
    return got


def test_a_resumed_stream_continues_at_the_requested_byte(url: str) -> None:
    body = BODY | {"stream": True}
    got = cut(url, 700, body, names("by byte"))
    rest = httpx.get(
        f"{url}/v1/stream", params={"conv_id": "by byte", "from": len(got)}, timeout=60
    )
    whole = httpx.get(f"{url}/v1/stream/by byte", timeout=60)
    assert got + rest.content == whole.content
    assert whole.content.endswith(b"data: [DONE]\n\n")


def test_a_stream_can_be_resumed_at_every_byte(url: str) -> None:
    whole = post(url, BODY | {"stream": True, "max_tokens": 4}, **names("every byte")).content
    with httpx.Client() as client:
        for number in range(0, len(whole) + 1, 37):
            params = {"conv_id": "every byte", "from": number}
            assert client.get(f"{url}/v1/stream", params=params).content == whole[number:]


def test_a_stream_can_be_resumed_after_every_event(url: str) -> None:
    stream_id = post(url, BODY | {"max_tokens": 6}, **names("every event")).headers["x-stream-id"]
    events_url = f"{url}/v1/streams/{stream_id}/events"
    page = httpx.get(events_url, headers={"Accept": "application/json"}).json()
    assert page["done"] and [event["seq"] for event in page["events"]] == list(
        range(len(page["events"]))
    )
    whole = httpx.get(events_url).text.split("\n\n")
    for seq in range(len(whole) - 2):
        rest = httpx.get(events_url, headers={"Last-Event-ID": f"{stream_id}:{seq}"})
        assert rest.text.split("\n\n") == whole[seq + 1 :]
    assert httpx.get(events_url, params={"after": len(whole) - 2}).status_code == 204


def test_a_stream_can_be_resumed_after_every_frame(url: str) -> None:
    body = BODY | {"stream": True, "max_tokens": 6, "n": 2}
    answer = post(url, body, **names("every frame"))
    frames = answer.text.split("\n\n")[:-1]
    ids = [frame.split("\n")[0].removeprefix("id: ") for frame in frames]
    events_url = f"{url}/v1/streams/{answer.headers['x-stream-id']}/events?view=wire"
    for number, cursor in enumerate(ids[:-1]):
        rest = httpx.get(events_url, headers={"Last-Event-ID": cursor})
        assert rest.text.split("\n\n")[:-1] == frames[number + 1 :]


@pytest.mark.parametrize("route", ["/api/chat", "/api/generate"])
def test_ollamas_answers_can_be_resumed_at_every_byte_and_line(url: str, route: str) -> None:
    asked = {"messages": [{"role": "user", "content": "one"}], "prompt": "one"}
    asked.pop("prompt" if route == "/api/chat" else "messages")
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    body = asked | {"model": model, "options": {"num_predict": 4}}
    answer = httpx.post(f"{url}{route}", json=body, headers=names(route), timeout=60)
    whole = answer.content
    for number in range(0, len(whole) + 1, 37):
        params = {"conv_id": route, "from": number}
        assert httpx.get(f"{url}/v1/stream", params=params).content == whole[number:]
    lines = whole.splitlines(keepends=True)
    events_url = f"{url}/v1/streams/{answer.headers['x-stream-id']}/events?view=wire"
    for number, line in enumerate(lines[:-1]):
        rest = httpx.get(f"{events_url}&after={json.loads(line)['id']}")
        assert rest.headers["content-type"] == "application/x-ndjson"
        assert rest.content == b"".join(lines[number + 1 :])
    durable = httpx.get(f"{url}/v1/durable/{answer.headers['x-stream-id']}?offset=-1")
    assert durable.json()[-1]["kind"] == "finish"


@pytest.mark.parametrize("cursor", ["x", "-1", "99999", "cmpl-other:1", "1.x", "1e3"])
def test_an_invalid_cursor_is_refused(url: str, cursor: str) -> None:
    stream_id = post(url, BODY | {"max_tokens": 1}, **names("cursors")).headers["x-stream-id"]
    refused = httpx.get(f"{url}/v1/streams/{stream_id}/events", params={"after": cursor})
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "invalid_cursor"


@pytest.mark.parametrize("offset", ["-1", "%2B1", "1e3", "12abc", "0x10", "18446744073709551616"])
def test_an_invalid_byte_offset_is_refused(url: str, offset: str) -> None:
    post(url, BODY | {"max_tokens": 1}, **names("offsets"))
    refused = httpx.get(f"{url}/v1/stream?conv_id=offsets&from={offset}")
    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == "Invalid 'from' offset"


def test_an_offset_at_the_end_is_empty_and_one_beyond_it_is_a_416(url: str) -> None:
    total = len(post(url, BODY | {"max_tokens": 1, "stream": True}, **names("end")).content)
    at_end = httpx.get(f"{url}/v1/stream", params={"conv_id": "end", "from": total})
    assert (at_end.status_code, at_end.content) == (200, b"")
    beyond = httpx.get(f"{url}/v1/stream", params={"conv_id": "end", "from": total + 1})
    assert beyond.status_code == 416 and beyond.json()["error"]["total_bytes"] == total


@pytest.mark.parametrize("name", ["a/b", "a:b", "a%b", "a b", "a::model"])
def test_conversation_ids_with_special_characters_are_found_and_deleted(
    url: str, name: str
) -> None:
    post(url, BODY | {"max_tokens": 1}, **names(name))
    asked = {"conversation_ids": [name.removesuffix("::model"), "unknown", 7, ""]}
    entries = httpx.post(f"{url}/v1/streams/lookup", json=asked).json()
    assert [entry["conversation_id"] for entry in entries] == [name]
    assert entries[0]["is_done"] and entries[0]["completed_at"] >= entries[0]["started_at"]
    query = {"conversation_id": [name, "unknown"]}
    assert httpx.get(f"{url}/v1/streams", params=query).json() == entries
    stream = httpx.get(f"{url}/v1/stream", params={"conv_id": name})
    assert len(stream.content) == entries[0]["total_bytes"]
    assert httpx.delete(f"{url}/v1/stream", params={"conv_id": name}).status_code == 204
    gone = httpx.get(f"{url}/v1/stream", params={"conv_id": name})
    assert gone.status_code == 404 and gone.json()["error"]["type"] == "not_found_error"


PAGE_ID = "c1f3::headrace/tiny"


def looked_up(url: str) -> list[dict[str, object]]:
    found = httpx.post(f"{url}/v1/streams/lookup", json={"conversation_ids": ["c1f3"]})
    entries: list[dict[str, object]] = found.json()
    return entries


def test_llama_cpps_web_page_can_find_resume_and_delete_a_stream(url: str) -> None:
    """Send the page's requests in its order. It resumes at the end of the last whole line."""
    body: dict[str, Any] = LONG | {"max_tokens": 300, "return_progress": True}
    body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    named = names(PAGE_ID)
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, headers=named) as answer:
        got = b"".join(piece for piece, _ in zip(answer.iter_raw(), range(6), strict=False))
    offset = got.rfind(b"\n") + 1
    assert looked_up(url)[0]["conversation_id"] == PAGE_ID
    params: dict[str, str | int] = {"conv_id": PAGE_ID, "from": offset}
    rest = httpx.get(f"{url}/v1/stream", params=params, timeout=60).content
    eventually(lambda: looked_up(url)[0]["is_done"] is True)
    whole = got[:offset] + rest
    chunks = data_in(whole)
    progress = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    assert progress[-1]["processed"] == progress[-1]["total"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert whole.endswith(b"data: [DONE]\n\n")
    assert httpx.delete(f"{url}/v1/stream", params={"conv_id": PAGE_ID}).status_code == 204
    assert looked_up(url) == []
    assert httpx.get(f"{url}/v1/stream", params=params).status_code == 404


def test_an_empty_conversation_id_is_ignored(url: str) -> None:
    answer = post(url, BODY | {"max_tokens": 1}, **names(""))
    assert answer.status_code == 200
    assert httpx.get(f"{url}/v1/streams", params={"conversation_id": ""}).status_code == 400


def test_a_stop_ends_a_stream_for_every_reader(url: str) -> None:
    with httpx.stream("POST", f"{url}/v1/completions", json=LONG, headers=names("stop")) as answer:
        lines = answer.iter_lines()
        next(lines)
        stream_id = answer.headers["x-stream-id"]
        stopped = httpx.post(f"{url}/v1/streams/{stream_id}/cancel").json()
        last = list(data_of(lines))[-1]
    assert stopped["state"] == "cancelled" and stopped["error"]["code"] == "cancelled"
    assert last["error"]["code"] == "cancelled"


def test_a_cancelled_request_without_stream_is_a_400_without_retry(url: str) -> None:
    found: list[httpx.Response] = []
    body = LONG | {"stream": False}
    asking = threading.Thread(target=lambda: found.append(post(url, body, **names("whole"))))
    asking.start()
    lookup = {"conversation_ids": ["whole"]}
    eventually(lambda: bool(httpx.post(f"{url}/v1/streams/lookup", json=lookup).json()))
    httpx.delete(f"{url}/v1/stream", params={"conv_id": "whole"})
    asking.join(timeout=30)
    assert found[0].status_code == 400 and found[0].json()["error"]["code"] == "cancelled"
    assert found[0].headers["x-should-retry"] == "false"


def test_a_retry_with_the_same_key_gets_the_same_answer(url: str) -> None:
    first = post(url, **{"Idempotency-Key": "again"})
    again = post(url, **{"Idempotency-Key": "again"})
    assert first.json() == again.json() and again.headers["x-stream-attached"] == "true"
    other = post(url, BODY | {"max_tokens": 3}, **{"Idempotency-Key": "again"})
    assert other.status_code == 409


def test_a_second_reader_gets_the_same_bytes_as_the_first(url: str) -> None:
    body = BODY | {"stream": True, "max_tokens": 200}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=names("two")) as first:
        stream_id = first.headers["x-stream-id"]
        second = httpx.get(f"{url}/v1/streams/{stream_id}/events?view=wire", timeout=60)
        assert second.text == first.read().decode()


def test_unknown_streams_are_not_found_by_id_or_by_name(url: str) -> None:
    assert httpx.get(f"{url}/v1/streams/cmpl-none").status_code == 404
    assert httpx.get(f"{url}/v1/streams/cmpl-none/events").status_code == 404
    assert httpx.delete(f"{url}/v1/streams/cmpl-none").status_code == 204
    assert httpx.get(f"{url}/v1/stream").status_code == 400
    assert httpx.delete(f"{url}/v1/stream").status_code == 400


def test_an_engine_kill_loses_no_token_and_is_reported_in_the_stream(server: ServerProcess) -> None:
    body = LONG | {"max_tokens": 400, "return_progress": True}
    undisturbed = post(server.url, body | {"stream": False}).json()["choices"][0]["text"]
    for _ in range(4):  # a slow reader may kill the engine too late
        texts, attempts, kills = [], [], [server.kill_engine]
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120) as answer:
            for frame in data_of(answer.iter_lines()):
                attempts += [frame["recovering"]] if "recovering" in frame else []
                texts += [choice["text"] for choice in frame["choices"]]
                if len(texts) >= 30 and kills:
                    kills.pop()()
        assert "".join(texts) == undisturbed
        if attempts:
            break
    assert attempts == [{"attempt": 1}]


def test_idle_connections_take_no_descriptors_from_engines_or_streams(
    server: ServerProcess,
) -> None:
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (128, 128))
    address = ("127.0.0.1", httpx.URL(server.url).port)
    body = LONG | {"max_tokens": 400}
    line = httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60)
    with contextlib.ExitStack() as flood, line as answer:
        for _ in range(200):
            flood.enter_context(socket.create_connection(address))
        server.kill_engine()
        for _ in range(100):
            flood.enter_context(socket.create_connection(address))
        assert httpx.get(f"{server.url}/health/live").status_code == 200
        assert answer.read().endswith(b"data: [DONE]\n\n")


def message(url: str, key: str, kills: dict[int, Callable[[], None]]) -> tuple[str, bool]:
    """Stream a message; return its text and whether it attached to an earlier stream.

    Before the end, call each function of `kills` after that many deltas.
    """
    body = {"model": "kept", "messages": [{"role": "user", "content": "hi"}], "stream": True}
    body |= {"max_tokens": 500, "temperature": 0, "ignore_eos": True}
    headers, texts, last = {"Idempotency-Key": key}, list[str](), ""
    with httpx.stream(
        "POST", f"{url}/v1/messages", json=body, headers=headers, timeout=120
    ) as answer:
        for frame in data_of(answer.iter_lines()):
            last = frame.get("type", last)
            if last == "content_block_delta":
                texts.append(frame["delta"]["text"])
                kills.get(len(texts), int)()
        assert last == "message_stop"
        return "".join(texts), answer.headers.get("x-stream-attached") == "true"


def test_a_restarted_server_continues_its_durable_streams(folder: Path, tmp_path: Path) -> None:
    flags = (str(folder), "--threads", "1", "--served-model-name", "kept")
    flags += ("--state-dir", str(tmp_path / "state"))
    # Mirostat's state depends on all earlier tokens, so it must be restored exactly.
    body = LONG | {"max_tokens": 1200, "temperature": 1, "seed": 5, "mirostat": 2}
    with running_server(*flags) as server:
        undisturbed = post(server.url, body | {"stream": False}).json()["choices"][0]["text"]
        said, _ = message(server.url, "undisturbed", {})
        got = cut(server.url, 30_000, body, names("kept"))
        engine = server.engine_pid
        kills = {
            20: lambda: os.kill(engine, signal.SIGKILL),  # the stream recovers by itself
            200: lambda: server.process.send_signal(signal.SIGKILL),
        }
        with pytest.raises(httpx.TransportError):
            message(server.url, "message", kills)
        server.stop(signal.SIGKILL)
        eventually(lambda: not Path(f"/proc/{engine}").exists())
    with running_server(*flags) as server:
        # A client that retries sends the same body with the same key.
        assert message(server.url, "message", {}) == (said, True)
        params = {"conv_id": "kept", "from": len(got)}
        whole = got + httpx.get(f"{server.url}/v1/stream", params=params, timeout=120).content
        texts = [choice["text"] for frame in data_in(whole) for choice in frame["choices"]]
        assert "".join(texts) == undisturbed
        assert whole == httpx.get(f"{server.url}/v1/stream", params={"conv_id": "kept"}).content


def test_a_cancellation_on_a_full_disk_is_a_503_but_takes_effect(server: ServerProcess) -> None:
    url, by_name = server.url, {"conv_id": "full"}
    body, named = LONG | {"max_tokens": 8000}, names("full")
    with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=named) as answer:
        stream_url = f"{url}/v1/streams/{answer.headers['x-stream-id']}"
    with full_disk(server):
        for refused in (httpx.delete(stream_url), httpx.post(f"{stream_url}/cancel")):
            assert refused.json()["error"]["code"] == "storage_unavailable"
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert httpx.delete(f"{url}/v1/stream", params=by_name).status_code == 503
        assert post(url, **names("refused")).status_code == 503
        assert post(url, BODY | {"max_tokens": 1}).status_code == 200
    eventually(lambda: httpx.get(stream_url).json()["state"] == "cancelled")
    eventually(lambda: httpx.delete(stream_url).status_code == 204)
    assert httpx.get(stream_url).status_code == 404
    assert not [line for line in server.lines if "Traceback" in line]
