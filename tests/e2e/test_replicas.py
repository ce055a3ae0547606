"""Tests of two engine replicas of one model: kills, replacement and scaling during streams."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.replicas import LIMIT_S, at_once, up
from tools.harness.eventually import eventually
from tools.harness.servers import ServerProcess, running_server
from tools.harness.tiny_models import make_tiny_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"))
    flags = ("--threads", "1", "--max-model-len", "4096", "--max-num-seqs", "4")
    with running_server(str(folder), "--replicas", "2", *flags) as running:
        eventually(lambda: len(up(running.url)) == 2, LIMIT_S)
        yield running


def test_streams_of_a_killed_engine_continue_on_the_other_with_the_same_text(
    server: ServerProcess,
) -> None:
    url = server.url
    whole = at_once(url, 4, 1500, lambda: None)
    assert not any(it.num_gaps for it in whole)

    def kill() -> None:
        taken = {it["number"]: it["taken"] for it in up(url)}
        assert set(taken.values()) == {2}
        os.kill(up(url)[0]["pid"], signal.SIGKILL)

    cut = at_once(url, 4, 1500, kill)
    assert [it.text for it in cut] == [it.text for it in whole]
    assert sum(it.num_gaps > 0 for it in cut) == 2
    eventually(lambda: len(up(url)) == 2, LIMIT_S)
    assert [it["starts"] for it in up(url)] == [2, 1]


def test_a_replaced_engine_finishes_its_streams(server: ServerProcess) -> None:
    url = server.url
    eventually(lambda: len(up(url)) == 2, LIMIT_S)
    first, second = (it["number"] for it in up(url))

    def replace() -> None:
        path = f"{url}/manage/replicas/replace"
        assert httpx.post(path, params={"replica": second}, timeout=LIMIT_S).status_code == 200

    streams = at_once(url, 4, 1500, replace)
    assert not any(it.num_gaps for it in streams)
    eventually(lambda: len(up(url)) == 2 and up(url)[1]["number"] > second, LIMIT_S)
    assert up(url)[0]["number"] == first
    answer = httpx.post(f"{url}/manage/replicas/replace", params={"replica": 99}, timeout=LIMIT_S)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "replica")


def test_the_desired_state_adds_and_removes_engines_while_streams_run(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    flags = ("--threads", "1", "--max-model-len", "4096", "--max-num-seqs", "4")
    several = ("--replicas", "2", "--min-replicas", "0", "--state-dir", str(tmp_path / "state"))
    with running_server(str(folder), *several, *flags) as server:
        url = f"{server.url}/manage/desired"
        (model,) = httpx.get(url, timeout=LIMIT_S).json()["models"]
        whole = at_once(server.url, 4, 1500, lambda: None)

        def put(replicas: int) -> None:
            document = {"models": [model | {"replicas": replicas, "min_replicas": replicas}]}
            httpx.put(url, json=document, timeout=LIMIT_S).raise_for_status()
            eventually(lambda: len(up(server.url)) == replicas, LIMIT_S)

        put(3)
        grown = {it["pid"] for it in up(server.url)}
        shrunk = at_once(server.url, 4, 1500, lambda: put(1))
        assert [it.text for it in shrunk] == [it.text for it in whole]
        assert {it["pid"] for it in up(server.url)} < grown
