"""Tests of a suspended computer: all server processes stop for longer than the time limits."""

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.test_realtime import open_socket
from tools.harness.eventually import eventually
from tools.harness.servers import ServerProcess, running_server

FLAGS = ("--max-num-seqs", "2", "--heartbeat-s", "1", "--max-stall-ms", "10000")
LONG = {"prompt": "Count from 1 to 400: 1, 2, 3,", "max_tokens": 1500, "ignore_eos": True}
QUEUED = {"prompt": "one two three", "max_tokens": 8, "temperature": 0}


def processes(pid: int) -> list[int]:
    """Return the ids of a process and all its descendants."""
    children = [
        int(child)
        for task in Path(f"/proc/{pid}/task").iterdir()
        for child in (task / "children").read_text().split()
    ]
    return [pid, *(found for child in children for found in processes(child))]


@contextlib.contextmanager
def stopped(server: ServerProcess) -> Iterator[None]:
    """Suspend all processes; the gateway wakes first, while the engine still seems stuck."""
    pids = processes(server.process.pid)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


class Following:
    """A client that reads a streamed completion in a thread."""

    def __init__(self, server: ServerProcess, body: dict[str, Any], **headers: str) -> None:
        self.received_at = 0.0
        self.text = self.end = ""
        self._url = f"{server.url}/v1/completions"
        self._body = {**body, "stream": True, "temperature": 0}
        self._headers = headers
        self.leaves = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        with httpx.stream(
            "POST", self._url, json=self._body, headers=self._headers, timeout=None
        ) as answer:
            for line in answer.iter_lines():
                self.received_at = time.monotonic()
                if self.leaves.is_set():
                    break
                if line == "data: [DONE]":
                    self.end += line
                elif line.startswith("data: "):
                    frame = json.loads(line.removeprefix("data: "))
                    self.text += "".join(it["text"] for it in frame.get("choices", ()))
                    self.end += str(frame.get("error", ""))

    def wait(self) -> "Following":
        self.thread.join(timeout=120)
        assert not self.thread.is_alive()
        return self


class HalfSent:
    """A request whose last bytes are not sent yet."""

    def __init__(self, server: ServerProcess, num_left: int) -> None:
        url, body = httpx.URL(server.url), '{"content": "a"}'
        head = f"POST /tokenize HTTP/1.1\r\nHost: {url.host}\r\nContent-Length: {len(body)}\r\n"
        head += "Content-Type: application/json\r\nConnection: close\r\n\r\n"
        whole = (head + body).encode()
        self._rest = whole[-num_left:]
        self._client = socket.create_connection((url.host, url.port), timeout=60)
        self._client.sendall(whole[:-num_left])

    def send_rest(self) -> None:
        self._client.sendall(self._rest)

    def status(self) -> bytes:
        with self._client:
            return self._client.recv(1 << 16).split()[1]


def figures(server: ServerProcess) -> dict[str, float]:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    shown = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in shown}


def missed(server: ServerProcess) -> float:
    it = figures(server).items()
    return sum(value for name, value in it if "missed_total" in name)


def sleep_through(seconds: float, *flags: str) -> None:
    """Suspend the server and check that all its clients then get their whole answers."""
    with running_server(*FLAGS, *flags) as server:
        alone = [Following(server, body).wait().text for body in (LONG, QUEUED)]
        with open_socket(server, ping_interval=None) as realtime:
            kept = httpx.Client(base_url=server.url, timeout=None)
            kept.get("/health/live")
            engine, before = server.engine_pid, missed(server)
            leaving = Following(server, LONG | {"max_tokens": 3000})
            durable = Following(server, LONG, **{"X-Conversation-Id": "lid"})
            eventually(lambda: bool(leaving.text and durable.text))
            queued = Following(server, QUEUED)
            realtime.ask("waits", QUEUED)
            realtime.event("waits", "queued", "heartbeat")
            eventually(lambda: bool(queued.received_at))
            halves = [
                HalfSent(server, num_left) for num_left in (1, 30)
            ]  # in the body, in the head
            with stopped(server):
                for half in halves:
                    half.send_rest()
                asked = threading.Thread(target=kept.get, args=("/health/live",))
                asked.start()
                time.sleep(seconds)  # must exceed the time limits
            woken_at = time.monotonic()
            everyone = [leaving, durable, queued]
            eventually(lambda: all(it.received_at > woken_at for it in everyone), within_s=10)
            leaving.leaves.set()
            assert [half.status() for half in halves] == [b"200"] * 2
            asked.join(timeout=60)
            assert kept.get("/health/live").status_code == 200
            assert realtime.end("waits")["kind"] == "finish"
            for it in (durable, queued):
                assert it.wait().end == "data: [DONE]"
        assert [it.wait().text for it in (durable, queued)] == alone
        assert server.engine_pid == engine
        assert not any("does not respond" in it for it in server.lines)
        assert missed(server) == before
        steps = httpx.get(f"{server.url}/manage/state").json()["steps"]
        assert steps and all(step["elapsed_ms"] < 1000 * seconds for step in steps)


@pytest.mark.slow
def test_clients_survive_a_suspension_longer_than_the_time_limits() -> None:
    sleep_through(12, "--queue-timeout-s", "8", "--headers-timeout-s", "4", "--body-timeout-s", "4")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_clients_survive_a_suspension_of_ten_minutes() -> None:
    sleep_through(600, "--queue-timeout-s", "60")
