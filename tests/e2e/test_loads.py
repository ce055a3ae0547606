"""News of a start while it loads: on stderr and in health, in text and in JSON."""

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from tools.harness.eventually import eventually
from tools.harness.processes import free_port
from tools.harness.servers import ServerProcess
from tools.harness.tiny_models import make_tiny_model

STAGE = re.compile(r"headrace: (.+)\.\.\.")


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_start_tells_its_stages_on_stderr_and_in_health(form: str, tmp_path: Path) -> None:
    folder, port = make_tiny_model(tmp_path / "tiny"), free_port()
    flags = ("--port", str(port), "--threads", "1", "--log-format", form)
    server = ServerProcess(str(folder), *flags)
    stages = set()

    def is_ready() -> bool:
        try:
            response = httpx.get(f"http://127.0.0.1:{port}/health")
        except httpx.TransportError:
            return False
        body: dict[str, Any] = response.json()
        if response.status_code == 503 and body["loading"]:
            assert body["error"]["message"] == "Loading model"
            assert body["loading"]["since_s"] >= 0
            stages.add(body["loading"]["stage"])
        return response.status_code == 200

    try:
        eventually(is_ready, within_s=120)
    finally:
        server.stop()
    assert "starting the engine" in stages
    lines = server.lines
    if form == "json":
        lines = [json.loads(line)["message"] for line in lines]
    told = [found[1] for line in lines if (found := STAGE.fullmatch(line))]
    assert told[0] == "starting" and STAGE.fullmatch(lines[0])
    assert "starting the engine" in told


def test_a_stream_that_comes_while_the_only_model_loads_waits_for_it(tmp_path: Path) -> None:
    folder, port = make_tiny_model(tmp_path / "tiny"), free_port()
    url = f"http://127.0.0.1:{port}"
    server = ServerProcess(str(folder), "--port", str(port), "--threads", "1", "--heartbeat-s", "1")

    def is_loading() -> bool:
        with contextlib.suppress(httpx.TransportError):
            loading = httpx.get(f"{url}/health").json().get("loading") or {}
            return loading.get("stage") == "starting the engine"
        return False

    body = {"prompt": "a", "max_tokens": 3, "stream": True, "return_progress": True}
    try:
        eventually(is_loading, within_s=120)
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
        assert httpx.get(f"{url}/health").status_code == 200
    finally:
        server.stop()
    assert answer.status_code == 200
    lines = [line for line in answer.text.splitlines() if line.startswith("data: ")]
    assert '"loading":{"stage":"' in lines[0] + lines[1], lines[:4]
    assert lines[-1] == "data: [DONE]"


def test_a_load_that_fails_ends_the_streams_that_wait_with_its_error(tmp_path: Path) -> None:
    folder, port = make_tiny_model(tmp_path / "tiny"), free_port()
    url = f"http://127.0.0.1:{port}"
    server = ServerProcess(
        str(folder), "--port", str(port), "--kv-cache-memory-bytes", str(1 << 40)
    )
    body = {"prompt": "a", "max_tokens": 3, "stream": True}
    answers = []

    def is_answered() -> bool:
        with contextlib.suppress(httpx.TransportError):
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
            answers.append(answer)
            return answer.status_code == 200
        return False

    try:
        eventually(is_answered, within_s=120)
        assert server.process.wait(timeout=60) == 3
    finally:
        server.stop()
    assert "load_failed" in answers[-1].text and "MiB are free" in "\n".join(server.lines)


def test_an_engine_yields_to_other_programs_as_asked_and_says_how_much_fits(
    tmp_path: Path,
) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    flags = ("--nice", "7", "--kv-cache-memory-bytes", "4000000", "--log-level", "debug")
    server = ServerProcess(str(folder), *flags)
    try:
        server.wait_until_ready()
        own = os.getpriority(os.PRIO_PROCESS, 0)
        assert os.getpriority(os.PRIO_PROCESS, server.process.pid) == own
        assert os.getpriority(os.PRIO_PROCESS, server.engine_pid) == min(own + 7, 19)
        assert os.getsid(server.engine_pid) == os.getsid(server.process.pid)
        assert os.getpgid(server.engine_pid) != os.getpgid(server.process.pid)  # no Ctrl-C
        lines = "\n".join(server.lines)
        assert re.search(r"DEBUG .*: tiny: lane .* at most \d+ streams, \d+ tokens fit, ", lines)
    finally:
        server.stop()
