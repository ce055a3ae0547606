"""Two engines of one model behind a real server: deaths and replacements cost a stream a gap."""

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.builders import make_tiny_model
from tests.eventually import eventually
from tests.servers import ServerProcess, running_server

ASKED = {"temperature": 0, "ignore_eos": True, "stream": True, "return_progress": True}
LIMIT_S = 240
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"))
    flags = ("--threads", "1", "--max-model-len", "4096", "--max-num-seqs", "4")
    with running_server(str(folder), "--replicas", "2", *flags) as running:
        eventually(lambda: len(up(running.url)) == 2, LIMIT_S)
        yield running


def up(url: str) -> list[dict[str, Any]]:
    """The replicas that are up."""
    state = httpx.get(f"{url}/manage/state", timeout=LIMIT_S).json()
    return [it for it in state["replicas"] if it["state"] == "up"]


class Following:
    """A stream as its client sees it."""

    def __init__(self, url: str, prompt: str, max_tokens: int) -> None:
        self._url = url
        self._body = {**ASKED, "prompt": prompt, "max_tokens": max_tokens}
        self.text, self.num_gaps, self.is_done = "", 0, False

    def follow(self) -> "Following":
        url = f"{self._url}/v1/completions"
        with httpx.stream("POST", url, json=self._body, timeout=LIMIT_S) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                self._take(line)
        assert self.is_done
        return self

    def _take(self, line: str) -> None:
        if line == "data: [DONE]":
            self.is_done = True
        elif line.startswith("data: "):
            frame = json.loads(line.removeprefix("data: "))
            assert "error" not in frame, frame
            self.text += "".join(choice["text"] for choice in frame.get("choices", ()))
            self.num_gaps += "recovering" in frame


def at_once(url: str, number: int, max_tokens: int, act: Any) -> list[Following]:
    """Streams side by side; `act` is called once each of them has text."""
    streams = [Following(url, f"stream {n % 4}", max_tokens) for n in range(number)]
    with ThreadPoolExecutor(number) as pool:
        running = [pool.submit(stream.follow) for stream in streams]
        eventually(lambda: all(it.text for it in streams), LIMIT_S)
        act()
        return [it.result(timeout=LIMIT_S) for it in running]


def test_a_killed_engines_streams_go_on_at_the_other_to_the_same_text(
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


def test_a_replaced_engine_ends_what_it_runs(server: ServerProcess) -> None:
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
