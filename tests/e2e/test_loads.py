"""Tests of load progress on stderr and in /health, in text and in JSON."""

import contextlib
import json
import os
import re
from pathlib import Path

import httpx

from tools.harness.eventually import eventually
from tools.harness.processes import free_port
from tools.harness.servers import ServerProcess
from tools.harness.tiny_models import make_tiny_model

STAGE = re.compile(r"headrace: (.+)\.\.\.")


def stages_of(lines: list[str]) -> list[str]:
    """Return the load stages that the log lines report."""
    return [found[1] for line in lines if (found := STAGE.fullmatch(line))]


def test_health_reports_load_stages_and_a_stream_waits_for_the_model(
    tmp_path: Path,
) -> None:
    folder, port = make_tiny_model(tmp_path / "tiny"), free_port()
    url = f"http://127.0.0.1:{port}"
    server = ServerProcess(str(folder), "--port", str(port), "--threads", "1", "--heartbeat-s", "1")

    def is_loading() -> bool:
        with contextlib.suppress(httpx.TransportError):
            response = httpx.get(f"{url}/health")
            body = response.json()
            if response.status_code == 503 and body["loading"]:
                assert body["error"]["message"] == "Loading model"
                assert body["loading"]["since_s"] >= 0
                return bool(body["loading"]["stage"] == "starting the engine")
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
    assert STAGE.fullmatch(server.lines[0])
    stages = stages_of(server.lines)
    assert stages[0] == "starting" and "starting the engine" in stages


def test_a_failed_load_ends_waiting_streams_with_its_error(tmp_path: Path) -> None:
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


def test_load_stages_are_logged_in_json_and_nice_applies_to_the_engine(
    tmp_path: Path,
) -> None:
    folder = make_tiny_model(tmp_path / "tiny")
    flags = ("--nice", "7", "--kv-cache-memory-bytes", "4000000")
    server = ServerProcess(str(folder), *flags, "--log-level", "debug", "--log-format", "json")

    def messages() -> list[str]:
        return [json.loads(line)["message"] for line in list(server.lines)]

    try:
        eventually(lambda: "Headrace is ready at" in "\n".join(messages()), within_s=120)
        own = os.getpriority(os.PRIO_PROCESS, 0)
        assert os.getpriority(os.PRIO_PROCESS, server.process.pid) == own
        assert os.getpriority(os.PRIO_PROCESS, server.engine_pid) == min(own + 7, 19)
        assert os.getsid(server.engine_pid) == os.getsid(server.process.pid)
        assert os.getpgid(server.engine_pid) != os.getpgid(
            server.process.pid
        )  # so Ctrl-C does not reach the engine
    finally:
        server.stop()
    stages = stages_of(messages())
    assert stages[0] == "starting" and "starting the engine" in stages
    report = re.compile(r"tiny: lane .* at most \d+ streams, \d+ tokens fit, ")
    assert any(report.search(message) for message in messages())
