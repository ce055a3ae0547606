"""Clients of a server that is told to stop while its engine does not answer."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from tools.harness.eventually import eventually
from tools.harness.servers import running_server
from tools.harness.tiny_models import make_tiny_model


def test_a_frozen_engine_keeps_no_client_from_the_reason(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    with (
        running_server(str(folder), "--threads", "1", "--drain-s", "0") as server,
        ThreadPoolExecutor() as pool,
    ):
        body = {"prompt": "hi", "max_tokens": 2000, "ignore_eos": True}
        asked = pool.submit(httpx.post, f"{server.url}/v1/completions", json=body, timeout=60)
        state = f"{server.url}/manage/state"
        eventually(lambda: int(httpx.get(state).json()["running"]) == 1)
        os.kill(server.engine_pid, signal.SIGSTOP)
        assert server.stop() == 0
        answer = asked.result()
        assert answer.status_code == 503, answer.text
        assert answer.json()["error"]["code"] == "server_shutdown"


def test_the_last_line_names_the_streams_that_the_next_start_continues(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    body = {"prompt": "hi", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    flags = (str(folder), "--threads", "1", "--state-dir", str(tmp_path / "state"))
    with running_server(*flags, "--drain-s", "0", "--max-step-tokens", "1") as server:
        url, mine = f"{server.url}/v1/completions", {"X-Conversation-Id": "mine"}
        with httpx.stream("POST", url, json=body, headers=mine, timeout=60) as answer:
            next(answer.iter_bytes())
            assert server.stop(signal.SIGINT) == 0
    assert server.lines[-1] == "headrace: stopped; 1 stream continues at the next start."
    with running_server(*flags) as server:
        assert httpx.delete(f"{server.url}/v1/stream?conv_id=mine", timeout=60).is_success
        assert server.stop(signal.SIGINT) == 0
    assert server.lines[-1] == "headrace: stopped."
