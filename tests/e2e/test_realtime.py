"""Tests of the realtime WebSocket, which carries many requests, on a real server."""

import contextlib
import json
import signal
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from tools.harness.eventually import eventually
from tools.harness.servers import ServerProcess, running_server

LONG = {"prompt": "Count from 1 to 400: 1, 2, 3,", "max_tokens": 2000, "ignore_eos": True}
SHORT = {"prompt": "one two", "max_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    flags = ("--max-num-seqs", "4", "--linger-s", "0.5", "--max-body-bytes", "65536")
    with running_server(*flags, "--heartbeat-s", "1") as running:
        yield running


class Socket:
    """A WebSocket client that collects all received messages in `frames`."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection
        self.frames: list[dict[str, Any]] = []

    def send(self, **frame: Any) -> None:
        self.connection.send(json.dumps(frame))

    def ask(self, id: str, body: dict[str, Any], **more: Any) -> None:
        self.send(type="request", id=id, route="/v1/completions", body=body, **more)

    def until(self, is_it: Any) -> dict[str, Any]:
        """Return the first matching frame, among those received or still to come."""
        for frame in self.frames:
            if is_it(frame):
                return frame
        while True:
            self.frames.append(json.loads(self.connection.recv(timeout=60)))
            if is_it(self.frames[-1]):
                return self.frames[-1]

    def event(self, id: str, *kinds: str) -> dict[str, Any]:
        frame = self.until(lambda f: f.get("id") == id and f.get("event", {}).get("kind") in kinds)
        return frame["event"]

    def end(self, id: str) -> dict[str, Any]:
        return self.event(id, "finish", "error")

    def error(self, id: str | None) -> dict[str, Any]:
        return self.until(lambda f: f["type"] == "error" and f["id"] == id)["error"]

    def events(self, id: str) -> list[dict[str, Any]]:
        return [f["event"] for f in self.frames if f.get("id") == id and "event" in f]


@contextlib.contextmanager
def open_socket(
    server: ServerProcess, ping_interval: float | None = 20, **headers: str
) -> Iterator[Socket]:
    url = server.url.replace("http", "ws") + "/v1/realtime-text"
    with connect(
        url, additional_headers=headers, compression=None, ping_interval=ping_interval
    ) as connection:
        yield Socket(connection)


def running(server: ServerProcess) -> int:
    return int(httpx.get(f"{server.url}/manage/state").json()["running"])


def is_error(frame: dict[str, Any]) -> bool:
    return frame["type"] == "error" or frame.get("event", {}).get("kind") == "error"


def logged(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if "seq" in event]


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(p["text"] for e in events for p in e.get("pieces", ()))


def test_many_requests_share_a_websocket_and_get_their_own_events(server: ServerProcess) -> None:
    with open_socket(server) as socket:
        for number in range(20):
            socket.ask(f"r{number}", SHORT | {"prompt": f"{number} two"})
        for number in range(20):
            assert socket.end(f"r{number}")["kind"] == "finish"
            events = logged(socket.events(f"r{number}"))
            assert events[0]["kind"] == "accepted"
            assert [event["seq"] for event in events] == list(range(len(events)))
    answer = httpx.post(f"{server.url}/v1/completions", json=SHORT | {"prompt": "7 two"}).json()
    assert text_of(socket.events("r7")) == answer["choices"][0]["text"]


def test_any_websocket_can_attach_to_a_stream_at_a_cursor(server: ServerProcess) -> None:
    with open_socket(server) as socket:
        socket.ask("a", SHORT, conversation_id="shared")
        socket.end("a")
        whole = logged(socket.events("a"))
        stream = next(f["stream"] for f in socket.frames)
    with open_socket(server) as socket:
        socket.send(type="attach", id="all", stream=stream)
        socket.send(type="attach", id="rest", stream=stream, after=2)
        socket.send(type="attach", id="none", stream=stream, after=len(whole) - 1)
        socket.send(type="attach", id="far", stream=stream, after=len(whole))
        socket.send(type="attach", id="odd", stream=stream, after="x")
        socket.send(type="attach", id="unknown", stream="cmpl-0")
        socket.end("all"), socket.end("rest")
        assert socket.events("all") == whole and socket.events("rest") == whole[3:]
        assert socket.until(lambda f: f.get("id") == "none")["notice"] == "at_end"
        assert socket.error("far")["code"] == socket.error("odd")["code"] == "invalid_cursor"
        assert socket.error("unknown")["status"] == 404


def test_a_stream_resumes_after_a_lost_connection_and_an_engine_kill(server: ServerProcess) -> None:
    body = LONG | {"max_tokens": 300, "temperature": 0}
    alone = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()
    with open_socket(server) as socket:
        socket.ask("a", body, idempotency_key="lost connection")
        socket.event("a", "tokens")
        stream = next(f["stream"] for f in socket.frames)
        read = logged(socket.events("a"))
        # Without the closing handshake, as if the network were lost.
        socket.connection.socket.shutdown(2)
    server.kill_engine()
    with open_socket(server) as socket:
        socket.send(type="attach", id="b", stream=stream, after=read[-1]["seq"])
        assert socket.end("b")["kind"] == "finish"
        read += logged(socket.events("b"))
    assert [event["seq"] for event in read] == list(range(len(read)))
    assert text_of(read) == alone["choices"][0]["text"]


def test_stop_cancels_one_stream_and_detach_keeps_a_durable_one(server: ServerProcess) -> None:
    with open_socket(server) as socket:
        socket.ask("one", LONG)
        socket.ask("two", LONG)
        socket.ask("three", LONG, idempotency_key="kept")
        for id in ("one", "two", "three"):
            socket.event(id, "tokens")
        socket.send(type="notification", stop="nobody")
        socket.send(type="notification", stop="one")
        assert socket.end("one")["code"] == "cancelled"
        socket.send(type="notification", detach="two")
        eventually(lambda: running(server) == 1, within_s=60)
        socket.send(type="notification", detach="three")
        socket.ask("three", SHORT)
        frame = socket.until(lambda f: f["type"] == "error" or f.get("event", {}).get("end"))
        assert frame["id"] == "three"
        again = next(f for f in socket.frames if f["id"] == "three")["stream"]
        stopped = httpx.post(f"{server.url}/v1/streams/{again}/cancel").json()
        assert stopped["id"] == again
    eventually(lambda: running(server) == 0, within_s=60)


def test_fifty_requests_are_stopped_and_the_next_one_is_served(server: ServerProcess) -> None:
    with open_socket(server) as socket:
        for number in range(50):
            socket.ask(str(number), LONG | {"prompt": f"{number} and"})
        for number in range(50):
            socket.send(type="notification", stop=str(number))
        socket.ask("next", SHORT)
        assert socket.end("next")["kind"] == "finish"
        for number in range(50):
            frame = socket.until(lambda f, id=str(number): f.get("id") == id and is_error(f))
            assert frame.get("error", frame.get("event"))["code"] == "cancelled"
    eventually(lambda: running(server) == 0, within_s=60)


def test_the_websocket_stays_usable_after_every_error(server: ServerProcess) -> None:
    bad: list[tuple[str | bytes, str | None, str]] = [
        ("{", None, "invalid_json"),
        ("[1]", None, "invalid_json"),
        ("[" * 5000, None, "invalid_json"),
        (b"\x00\x01", None, "invalid_json"),
        ('{"type": "dance", "id": "x"}', "x", "invalid_value"),
        ('{"type": "request"}', None, "missing_required_parameter"),
        ('{"type": "request", "id": 5}', None, "invalid_type"),
        ('{"type": "request", "id": ""}', None, "invalid_value"),
        ('{"type": "request", "id": "a", "route": "/v1/completions"}', "a",
         "missing_required_parameter"),
        ('{"type": "request", "id": "b", "route": "/etc", "body": {}}', "b", "route_not_found"),
        ('{"type": "request", "id": "c", "route": "/v1/completions", "body": 5}', "c",
         "invalid_json"),
        ('{"type": "request", "id": "d", "route": "/v1/completions", "body": {"prompt": "x", '
         '"n": 0}}', "d", "invalid_value"),
        ('{"type": "request", "id": "e", "route": "/v1/completions", "body": {"prompt": "x"}, '
         '"conversation_id": "\\u00e9\\u4e00"}', "e", "invalid_value"),
        ('{"type": "request", "id": "f", "route": "/v1/completions", "body": {"prompt": "x", '
         '"model": "other"}}', "f", "model_not_found"),
        ('{"type": "notification"}', None, "missing_required_parameter"),
    ]  # fmt: skip
    with open_socket(server) as socket:
        for frame, id, code in bad:
            socket.frames.clear()
            socket.connection.send(frame)
            assert socket.error(id)["code"] == code, frame
        socket.ask("busy", LONG)
        socket.ask("busy", SHORT)
        assert socket.error("busy")["code"] == "duplicate_id"
        socket.event("busy", "tokens")
        socket.send(type="notification", stop="busy")
        socket.end("busy")
        socket.frames.clear()
        socket.ask("busy", SHORT)
        assert socket.end("busy")["kind"] == "finish"
    said = "route=/v1/realtime-text outcome=model_not_found status=404 asked=other"
    eventually(lambda: any(said in line for line in server.lines), within_s=60)
    figures = httpx.get(f"{server.url}/metrics").text
    assert 'headrace_rejections_total{reason="duplicate_id"}' in figures


def test_a_too_large_frame_closes_the_websocket(server: ServerProcess) -> None:
    with open_socket(server) as socket:
        socket.connection.send("x" * 100_000)
        with pytest.raises(ConnectionClosed) as closed:
            socket.connection.recv(timeout=60)
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1009


def test_closing_the_websocket_cancels_streams_without_a_conversation(
    server: ServerProcess,
) -> None:
    with open_socket(server) as socket:
        socket.ask("a", LONG)
        socket.ask("b", LONG, conversation_id="left")
        socket.event("a", "tokens"), socket.event("b", "tokens")
        stream = next(f for f in socket.frames if f["id"] == "b")["stream"]
    eventually(lambda: running(server) == 1, within_s=60)
    httpx.delete(f"{server.url}/v1/streams/{stream}").raise_for_status()
    eventually(lambda: running(server) == 0, within_s=60)


@pytest.mark.slow
def test_the_websocket_needs_an_api_key_and_announces_a_drain() -> None:
    with running_server("--api-key", "sesame", "--max-num-seqs", "1") as server:
        with open_socket(server, Authorization="Bearer sesame") as socket:
            socket.ask("a", SHORT, idempotency_key="k")
            socket.end("a")
            stream = socket.frames[0]["stream"]
        with open_socket(server) as socket:
            socket.send(type="hello", api_key="sesame")
            socket.send(type="attach", id="a", stream=stream)
            assert socket.end("a")["kind"] == "finish"
        for first in ({"type": "hello", "api_key": "open"}, {"type": "request", "id": "a"}):
            with open_socket(server) as socket:
                socket.send(**first)
                assert socket.error(None)["code"] == "invalid_api_key"
                with pytest.raises(ConnectionClosed) as closed:
                    socket.connection.recv(timeout=60)
                assert closed.value.rcvd is not None and closed.value.rcvd.code == 1008
        with open_socket(server, Authorization="Bearer sesame") as socket:
            socket.ask("a", LONG)
            socket.event("a", "tokens")
            server.process.send_signal(signal.SIGTERM)
            socket.until(lambda f: f.get("notice") == "draining")
            socket.ask("b", SHORT)
            assert socket.error("b")["code"] == "server_shutdown"
            server.process.send_signal(signal.SIGTERM)
            assert socket.end("a")["code"] == "server_shutdown"
            began = time.monotonic()
            with pytest.raises(ConnectionClosed) as closed:
                socket.connection.recv(timeout=60)
            assert closed.value.rcvd is not None and closed.value.rcvd.code == 1001
            assert time.monotonic() - began < 30
        assert server.stop() == 0
