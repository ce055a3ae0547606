"""Tests of two gateways with engines on two Ray nodes, one Redis and HAProxy."""

import time
from collections.abc import Iterator
from typing import NamedTuple

import httpx
import pytest

from stress.cluster.balancer import balanced
from stress.cluster.nodes import RayNode, engines, two_nodes
from tests.replicas import LIMIT_S, up
from tools.harness.eventually import eventually
from tools.harness.processes import free_port
from tools.harness.redis_servers import DURABLE, redis_server
from tools.harness.servers import ServerProcess
from tools.harness.sse import data_in, data_of

FLAGS = ("--threads", "1", "--max-model-len", "2048", "--max-num-seqs", "4", "--heartbeat-s", "1")
CHAT = {
    "messages": [{"role": "user", "content": "Hello! Who are you?"}],
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
}


class Together(NamedTuple):
    one: ServerProcess
    two: ServerProcess
    url: str  # of the load balancer
    nodes: tuple[RayNode, RayNode]


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Together]:
    folder = tmp_path_factory.mktemp("together")
    with (
        two_nodes() as (address, *nodes),
        redis_server(folder / "redis", *DURABLE, port=free_port()) as redis,
    ):
        flags = ("--cluster", address, "--replicas", "2", "--state-dir", redis.url, *FLAGS)
        ports = (free_port(), free_port())
        servers = [ServerProcess("headrace-mini", *flags, "--port", str(port)) for port in ports]
        try:
            eventually(lambda: all(it.url for it in servers), LIMIT_S)
            eventually(lambda: all(len(up(it.url)) == 2 for it in servers), LIMIT_S)
            with balanced(ports, folder) as url:
                yield Together(servers[0], servers[1], url, (nodes[0], nodes[1]))
        finally:
            for server in servers:
                server.stop()


def said(body: bytes) -> str:
    deltas = [choice["delta"] for frame in data_in(body) for choice in frame["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


def ask(url: str, max_tokens: int, name: str = "") -> bytes:
    body = CHAT | {"max_tokens": max_tokens}
    headers = {"X-Conversation-Id": name} if name else {}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=LIMIT_S)
    answer.raise_for_status()
    return answer.content


def test_each_gateway_has_its_own_engines(together: Together) -> None:
    """Neither gateway uses the other's actors or their resources on the nodes."""
    first, second = ({it["pid"] for it in up(url)} for url in (together.one.url, together.two.url))
    assert len(first) == len(second) == 2
    assert first | second == set(engines(*together.nodes))
    assert not first & second


def test_a_chat_gets_the_same_answer_from_each_gateway_and_the_balancer(together: Together) -> None:
    answers = {said(ask(url, 60)) for url in (together.one.url, together.two.url, together.url)}
    assert len(answers) == 1 and answers.pop()


def test_a_stream_can_be_resumed_at_the_other_gateway_and_the_balancer(together: Together) -> None:
    undisturbed = said(ask(together.two.url, 800))
    body, headers = CHAT | {"max_tokens": 800}, {"X-Conversation-Id": "handed on"}
    url, got = f"{together.one.url}/v1/chat/completions", b""
    with httpx.stream("POST", url, json=body, headers=headers, timeout=LIMIT_S) as answer:
        for piece in answer.iter_raw():
            got += piece
            if len(got) > 3000:
                break
    params = {"conv_id": "handed on", "from": len(got)}
    rest = httpx.get(f"{together.two.url}/v1/stream", params=params, timeout=LIMIT_S)
    whole = got + rest.content
    assert said(whole) == undisturbed
    again = {"conv_id": "handed on"}
    for _ in range(2):  # the balancer takes turns
        assert httpx.get(f"{together.url}/v1/stream", params=again).content == whole


def test_the_other_gateway_can_cancel_a_stream(together: Together) -> None:
    body, headers = CHAT | {"max_tokens": 1900}, {"Idempotency-Key": "stopped"}
    url = f"{together.one.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=LIMIT_S) as answer:
        frames = data_of(answer.iter_lines())
        next(frames)
        stop = f"{together.two.url}/v1/streams/{answer.headers['x-stream-id']}/cancel"
        assert httpx.post(stop, timeout=LIMIT_S).json()["state"] == "cancelled"
        last = [*frames][-1]
    assert last["error"]["code"] == "cancelled"
    # The engine's slot is free again.
    eventually(lambda: not any(it["taken"] for it in up(together.one.url)), LIMIT_S)


def test_both_gateways_count_their_requests(together: Together) -> None:
    for server in (together.one, together.two):
        before = requests_of(server)
        ask(server.url, 2)
        assert requests_of(server) == before + 1


def requests_of(server: ServerProcess) -> float:
    lines = httpx.get(f"{server.url}/metrics").text.splitlines()
    return sum(float(it.split()[-1]) for it in lines if it.startswith("headrace_requests_total{"))


def test_engines_of_the_other_gateway_continue_the_stream_of_a_killed_one(
    together: Together,
) -> None:
    """Also check that the killed gateway's engines stop. Run last, since it stays dead."""
    undisturbed = said(ask(together.two.url, 1500))
    body, headers = CHAT | {"max_tokens": 1500}, {"Idempotency-Key": "inherited"}
    url = f"{together.one.url}/v1/chat/completions"
    with httpx.stream("POST", url, json=body, headers=headers, timeout=LIMIT_S) as answer:
        stream_id = answer.headers["x-stream-id"]
        next(data_of(answer.iter_lines()))
        together.one.process.kill()
    events = f"{together.two.url}/v1/streams/{stream_id}/events"
    began = time.monotonic()
    wire = httpx.get(f"{events}?view=wire", timeout=LIMIT_S)
    print(f"whole {time.monotonic() - began:.1f} s after the kill")
    assert said(wire.content) == undisturbed
    mine = {it["pid"] for it in up(together.two.url)}
    eventually(lambda: set(engines(*together.nodes)) == mine, LIMIT_S)
