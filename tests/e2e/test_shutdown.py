"""Tests that stop a server with clients, with and without a responsive engine."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from tools.harness.eventually import eventually
from tools.harness.servers import running_server

BODY = {"prompt": "hi", "max_tokens": 2000, "ignore_eos": True}


def test_a_stop_counts_continuing_streams_and_answers_other_clients_with_503(
    folder: Path, tmp_path: Path
) -> None:
    flags = (str(folder), "--threads", "1", "--drain-s", "0", "--state-dir", str(tmp_path))
    with running_server(*flags, "--max-step-tokens", "1") as server:
        url, mine = f"{server.url}/v1/completions", {"X-Conversation-Id": "mine"}
        asked = {**BODY, "stream": True}
        with httpx.stream("POST", url, json=asked, headers=mine, timeout=60) as streamed:
            next(streamed.iter_bytes())
            assert server.stop(signal.SIGINT) == 0
    assert server.lines[-1] == "headrace: stopped; 1 stream continues at the next start."
    with running_server(*flags) as server, ThreadPoolExecutor() as pool:
        assert httpx.delete(f"{server.url}/v1/stream?conv_id=mine", timeout=60).is_success
        state = f"{server.url}/manage/state"
        eventually(lambda: int(httpx.get(state).json()["running"]) == 0)
        waiting = pool.submit(httpx.post, f"{server.url}/v1/completions", json=BODY, timeout=60)
        eventually(lambda: int(httpx.get(state).json()["running"]) == 1)
        os.kill(server.engine_pid, signal.SIGSTOP)
        assert server.stop() == 0
        answer = waiting.result()
        assert answer.status_code == 503, answer.text
        assert answer.json()["error"]["code"] == "server_shutdown"
    assert server.lines[-1] == "headrace: stopped."
