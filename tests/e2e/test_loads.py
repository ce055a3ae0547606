"""News of a start while it loads: on stderr and in health, in text and in JSON."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from tools.harness.eventually import eventually
from tools.harness.processes import free_port
from tools.harness.servers import ServerProcess
from tools.harness.tiny_models import make_tiny_model

STAGE = re.compile(r"headrace: (.+?)(?:, .*)? \(\d+ s\)")


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
