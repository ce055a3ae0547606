"""Tests that streams survive the loss of engines, actors and nodes of a local Ray cluster."""

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from stress.cluster.nodes import RayNode, two_nodes
from tests.replicas import LIMIT_S, at_once, up
from tools.harness.eventually import eventually
from tools.harness.processes import parent
from tools.harness.servers import ServerProcess, running_server

FLAGS = ("--threads", "1", "--max-model-len", "2048", "--max-num-seqs", "4")
NUM_TOKENS = 1000


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[str, RayNode, RayNode]]:
    with two_nodes() as nodes:
        yield nodes


@pytest.fixture(scope="module")
def server(cluster: tuple[str, RayNode, RayNode]) -> Iterator[ServerProcess]:
    address, *_ = cluster
    replicas = ("--cluster", address, "--replicas", "2")
    with running_server("headrace-mini", *replicas, *FLAGS) as running:
        yield running


@pytest.fixture(scope="module")
def undisturbed(server: ServerProcess) -> list[str]:
    """Return the answers of `at_once` without a failure."""
    eventually(lambda: len(up(server.url)) == 2, LIMIT_S)
    streams = at_once(server.url, 4, NUM_TOKENS, lambda: None)
    assert not any(it.num_gaps for it in streams)
    return [it.text for it in streams]


def disturb(server: ServerProcess, texts: list[str], kill: Callable[[], None]) -> None:
    """Run `kill` during streams of both engines; check their texts, and a gap in half of them."""

    def act() -> None:
        assert {it["taken"] for it in up(server.url)} == {2}
        kill()

    streams = at_once(server.url, 4, NUM_TOKENS, act)
    assert [it.text for it in streams] == texts
    assert sorted(it.num_gaps for it in streams) == [0, 0, 1, 1]
    eventually(lambda: len(up(server.url)) == 2, LIMIT_S)


def test_each_node_has_an_engine_and_a_chat_is_answered(
    server: ServerProcess, cluster: tuple[str, RayNode, RayNode], undisturbed: list[str]
) -> None:
    _, head, worker = cluster
    pids = [it["pid"] for it in up(server.url)]
    assert sorted(sum(node.runs(pid) for pid in pids) for node in (head, worker)) == [1, 1]
    body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 8}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=LIMIT_S)
    assert answer.json()["choices"][0]["message"]["content"]


def test_only_a_server_with_a_cluster_loads_ray(server: ServerProcess) -> None:
    def has_ray(running: ServerProcess) -> bool:
        return "_raylet" in Path(f"/proc/{running.process.pid}/maps").read_text()

    assert has_ray(server)
    with running_server("headrace-mini", *FLAGS) as alone:
        assert not has_ray(alone)


def test_streams_of_a_killed_engine_continue_on_the_other(
    server: ServerProcess, undisturbed: list[str]
) -> None:
    disturb(server, undisturbed, lambda: os.kill(up(server.url)[0]["pid"], signal.SIGKILL))


def test_streams_of_a_killed_actor_continue_on_the_other_engine(
    server: ServerProcess, undisturbed: list[str]
) -> None:
    disturb(server, undisturbed, lambda: os.kill(parent(up(server.url)[1]["pid"]), signal.SIGKILL))


def test_streams_of_a_hanging_actor_continue_on_the_other_engine(
    server: ServerProcess, undisturbed: list[str]
) -> None:
    eventually(lambda: len(up(server.url)) == 2, LIMIT_S)
    agent = parent(up(server.url)[0]["pid"])
    try:
        disturb(server, undisturbed, lambda: os.kill(agent, signal.SIGSTOP))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(agent, signal.SIGCONT)


def test_a_killed_gateway_leaves_no_engine(cluster: tuple[str, RayNode, RayNode]) -> None:
    with running_server("headrace-mini", "--cluster", cluster[0], *FLAGS) as running:
        (engine,) = up(running.url)
        assert Path(f"/proc/{engine['pid']}").exists()
        running.process.kill()
        eventually(lambda: not Path(f"/proc/{engine['pid']}").exists(), LIMIT_S)


def test_replacing_an_engine_changes_no_stream(
    server: ServerProcess, undisturbed: list[str]
) -> None:
    first, second = (it["number"] for it in up(server.url))

    def replace() -> None:
        path = f"{server.url}/manage/replicas/replace"
        httpx.post(path, params={"replica": first}, timeout=LIMIT_S).raise_for_status()

    streams = at_once(server.url, 4, NUM_TOKENS, replace)
    assert [it.text for it in streams] == undisturbed
    assert max(it.num_gaps for it in streams) <= 1
    eventually(lambda: [it["number"] for it in up(server.url)] == [second, second + 1], LIMIT_S)


def test_requests_start_an_engine_on_demand_and_it_stops_when_idle(
    cluster: tuple[str, RayNode, RayNode], server: ServerProcess
) -> None:
    address, *_ = cluster
    zero = ("--min-replicas", "0", "--replicas", "2", "--idle-unload-s", "2")
    with running_server("headrace-mini", "--cluster", address, *zero, *FLAGS) as running:
        assert not up(running.url)
        body = {"prompt": "one two", "max_tokens": 20, "temperature": 0, "ignore_eos": True}

        def ask(_: int) -> httpx.Response:
            url = f"{running.url}/v1/completions"
            return httpx.post(url, json=body, timeout=LIMIT_S)

        with ThreadPoolExecutor(32) as pool:
            answers = list(pool.map(ask, range(32)))
        assert {answer.status_code for answer in answers} == {200}
        assert {answer.json()["usage"]["completion_tokens"] for answer in answers} == {20}
        eventually(lambda: not up(running.url), LIMIT_S)
        streamed = httpx.post(
            f"{running.url}/v1/completions", json=body | {"stream": True}, timeout=LIMIT_S
        )
        assert "data: [DONE]" in streamed.text


def test_streams_of_a_lost_node_continue_on_the_other(
    server: ServerProcess, cluster: tuple[str, RayNode, RayNode], undisturbed: list[str]
) -> None:
    *_, worker = cluster
    eventually(lambda: len(up(server.url)) == 2, LIMIT_S)
    assert any(worker.runs(it["pid"]) for it in up(server.url))
    raylet = worker.raylet
    assert raylet is not None
    disturb(server, undisturbed, lambda: os.kill(raylet, signal.SIGKILL))
