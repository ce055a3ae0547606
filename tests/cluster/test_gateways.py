"""Tests of two gateways, each with its own engine, that share one Redis behind HAProxy."""

import contextlib
import json
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import pytest

from stress.cluster.balancer import balanced
from tools.harness.eventually import eventually
from tools.harness.processes import free_port
from tools.harness.redis_servers import DURABLE, RedisServer, redis_server
from tools.harness.servers import ServerProcess, running_server
from tools.harness.sse import data_in, data_of

BODY = {"prompt": "Once upon a time", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
STREAM = BODY | {"stream": True}
FLAGS = ("--threads", "1", "--dtype", "float32", "--heartbeat-s", "1", "--drain-s", "0")


class Gateway:
    """A server that keeps its port over restarts."""

    def __init__(self, redis_url: str) -> None:
        self.port = free_port()
        self._flags = (*FLAGS, "--port", str(self.port), "--state-dir", redis_url)
        self.server = ServerProcess(*self._flags)
        self.is_ended = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def end(self, number: signal.Signals) -> None:
        self.is_ended = True
        self.server.process.send_signal(number)

    def ready(self) -> None:
        """Wait until the server is ready; start it again if it has ended."""
        if self.is_ended:
            self.server.process.wait()
            self.server = ServerProcess(*self._flags)
            self.is_ended = False
        self.server.wait_until_ready()


class Cluster(NamedTuple):
    one: Gateway
    two: Gateway
    redis: RedisServer
    url: str  # of the load balancer


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("cluster")
    with redis_server(folder / "redis", *DURABLE, port=free_port()) as redis:
        gateways = [Gateway(redis.url) for _ in range(2)]
        try:
            for gateway in gateways:
                gateway.server.wait_until_ready()
            ports = (gateways[0].port, gateways[1].port)
            with balanced(ports, folder) as url:
                yield Cluster(*gateways, redis, url)
        finally:
            for gateway in gateways:
                gateway.server.stop(signal.SIGKILL)


@pytest.fixture
def cluster(running: Cluster) -> Cluster:
    """Return the cluster once both gateways are up."""
    for gateway in running[:2]:
        gateway.ready()
    return running


@pytest.fixture(scope="module")
def undisturbed() -> str:
    """Return the answer of a single server without a cluster."""
    with running_server(*FLAGS) as server:
        answer = httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=120)
        text: str = answer.json()["choices"][0]["text"]
        return text


def text_of(body: bytes) -> str:
    return "".join(choice["text"] for frame in data_in(body) for choice in frame["choices"])


def post(url: str, body: dict[str, Any] = BODY, **headers: str) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=120)


def begun(url: str, name: str, num_bytes: int = 3000) -> bytes:
    """Start a stream, read its first bytes, and disconnect."""
    got, headers = b"", {"X-Conversation-Id": name}
    with httpx.stream("POST", f"{url}/v1/completions", json=STREAM, headers=headers) as answer:
        for piece in answer.iter_raw():
            got += piece
            if len(got) >= num_bytes:
                break
    return got


def rest(url: str, name: str, got: bytes, within_s: float = 90) -> tuple[bytes, float]:
    """Resume the stream until it is whole; return it and its longest silence in seconds."""
    received_at, silent_s = time.monotonic(), 0.0
    deadline = received_at + within_s
    while not got.endswith(b"data: [DONE]\n\n"):
        assert time.monotonic() < deadline, got[-300:]
        with contextlib.suppress(httpx.TransportError):
            params = {"conv_id": name, "from": len(got)}
            with httpx.stream("GET", f"{url}/v1/stream", params=params, timeout=20) as answer:
                if answer.status_code == 200:
                    for piece in answer.iter_raw():
                        silent_s = max(silent_s, time.monotonic() - received_at)
                        received_at = time.monotonic()
                        got += piece
        time.sleep(0.1)
    return got, silent_s


def test_any_gateway_serves_a_stream(cluster: Cluster, undisturbed: str) -> None:
    one, two = cluster.one.url, cluster.two.url
    whole, _ = rest(two, "both", begun(one, "both"))
    assert text_of(whole) == undisturbed
    for url in (one, two, cluster.url):
        assert httpx.get(f"{url}/v1/stream", params={"conv_id": "both"}).content == whole
        lookup = httpx.post(f"{url}/v1/streams/lookup", json={"conversation_ids": ["both"]})
        assert lookup.json()[0]["total_bytes"] == len(whole)


def test_both_gateways_share_idempotency_keys(cluster: Cluster, undisturbed: str) -> None:
    answers: list[httpx.Response] = []

    def ask(url: str) -> None:
        answers.append(post(url, **{"Idempotency-Key": "again"}))

    asking = [threading.Thread(target=ask, args=(it.url,)) for it in cluster[:2]]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert answers[0].json() == answers[1].json()
    assert answers[0].json()["choices"][0]["text"] == undisturbed
    attached = [answer.headers.get("x-stream-attached") for answer in answers]
    assert sorted(attached, key=str) == [None, "true"]


def test_the_other_gateway_can_follow_and_cancel_a_stream(cluster: Cluster) -> None:
    one, two = cluster.one.url, cluster.two.url
    body = STREAM | {"max_tokens": 1500}
    headers = {"Idempotency-Key": "stopped"}
    with httpx.stream("POST", f"{one}/v1/completions", json=body, headers=headers) as answer:
        lines = answer.iter_lines()
        next(lines)
        stream_url = f"{two}/v1/streams/{answer.headers['x-stream-id']}"
        assert httpx.get(stream_url).json()["state"] in ("queued", "prompt", "decode")
        with httpx.stream("GET", f"{stream_url}/events") as events:
            event_lines = events.iter_lines()
            while next(event_lines) != "event: tokens":
                pass
            stopped = httpx.post(f"{stream_url}/cancel", timeout=20).json()
            assert stopped["state"] == "cancelled"
            last = list(data_of(event_lines))[-1]
        frames = list(data_of(lines))
    assert last["code"] == "cancelled"
    assert frames[-1]["error"]["code"] == "cancelled"


def test_the_other_gateway_can_replace_a_conversation(cluster: Cluster) -> None:
    one, two = cluster.one.url, cluster.two.url
    headers = {"X-Conversation-Id": "replaced"}
    body = STREAM | {"max_tokens": 1500}
    with httpx.stream("POST", f"{one}/v1/completions", json=body, headers=headers) as answer:
        lines = answer.iter_lines()
        next(lines)
        post(two, BODY | {"max_tokens": 2}, **headers)
        last = list(data_of(lines))[-1]
    assert last["error"]["code"] == "replaced"


@pytest.mark.parametrize("number", range(3))
def test_the_other_gateway_continues_the_streams_of_a_killed_one(
    cluster: Cluster, undisturbed: str, number: int
) -> None:
    name = f"killed {number}"
    got = begun(cluster.one.url, name, 3000 + 5000 * number)
    cluster.one.end(signal.SIGKILL)
    whole, silent_s = rest(cluster.url, name, got)
    print(f"silent for {silent_s:.1f} s")
    assert text_of(whole) == undisturbed
    again = httpx.get(f"{cluster.two.url}/v1/stream", params={"conv_id": name})
    assert again.content == whole


def test_a_draining_gateway_hands_its_stream_over(cluster: Cluster, undisturbed: str) -> None:
    got = begun(cluster.one.url, "drained")
    cluster.one.end(signal.SIGTERM)
    whole, silent_s = rest(cluster.url, "drained", got)
    print(f"silent for {silent_s:.1f} s")
    assert text_of(whole) == undisturbed


@pytest.mark.parametrize("outage_s", [5, 30])
def test_streams_survive_a_redis_outage(cluster: Cluster, undisturbed: str, outage_s: int) -> None:
    """A short outage pauses streams. A long one ends them, and they can be resumed afterwards.

    Requests without a stored stream are not affected.
    """
    headers = {"Idempotency-Key": f"outage {outage_s}"}
    url = f"{cluster.one.url}/v1/completions"
    got: list[str] = []
    with httpx.stream("POST", url, json=STREAM, headers=headers, timeout=20) as answer:
        stream_id = answer.headers["x-stream-id"]
        lines = (line for line in answer.iter_lines() if line.startswith("data: "))
        got += [next(lines) for _ in range(20)]
        cluster.redis.end(signal.SIGKILL)
        gone_at = time.monotonic()
        back = threading.Timer(outage_s, cluster.redis.start)
        back.start()
        plain = post(cluster.one.url)
        assert plain.json()["choices"][0]["text"] == undisturbed
        got += list(lines)
        left_s = time.monotonic() - gone_at
    back.join()
    if outage_s > 8:
        assert json.loads(got[-1][6:])["error"]["code"] == "storage_stalled"
        assert left_s < outage_s
        notice = got.pop()
        print(f"stalled after {left_s:.1f} s: {notice}")
    else:
        assert got[-1] == "data: [DONE]"
        beats = [line for line in got if '"text":""' in line]
        assert len(beats) >= 3
    whole_url = f"{cluster.two.url}/v1/streams/{stream_id}/events?view=wire"
    eventually(lambda: httpx.get(whole_url, timeout=60).status_code == 200, within_s=30)
    whole = httpx.get(whole_url, timeout=60).text
    assert text_of(whole.encode()) == undisturbed
    said = text_of("\n".join(got).encode())
    assert undisturbed.startswith(said) and said


def test_both_gateways_serve_metrics(cluster: Cluster) -> None:
    for it in cluster[:2]:
        post(it.url, BODY | {"max_tokens": 2})
        metrics = httpx.get(f"{it.url}/metrics").text
        assert "headrace_requests_total{" in metrics
