"""Tests of a batch for two models on a server that holds only one in memory."""

from collections import Counter
from pathlib import Path

import httpx
import pytest

from tests.e2e.batch_lines import in_lines, line, results
from tools.harness.eventually import eventually
from tools.harness.servers import running_server
from tools.harness.tiny_models import make_tiny_model

ROUTE = "/v1/completions"


@pytest.mark.slow
def test_a_batch_completes_while_its_models_are_swapped_in_and_out(tmp_path: Path) -> None:
    for name in ("one", "two"):
        make_tiny_model(tmp_path / "models" / name)
    flags = ("--models-dir", str(tmp_path / "models"), "--max-models", "1", "--threads", "1")
    lines = [
        line(f"{number}", {"model": name, "prompt": f"{number}", "max_tokens": 20}, ROUTE)
        for number, name in enumerate(["one", "two"] * 10)
    ]
    state = ("--state-dir", str(tmp_path / "state"))
    memory = ("--kv-cache-memory-bytes", str(16 << 20))
    with running_server(*flags, *state, *memory) as server:
        http = httpx.Client(base_url=server.url, timeout=120)

        def ask(method: str, path: str, **sent: object) -> dict[str, object]:
            answer = http.request(method, path, **sent)
            assert answer.status_code == 200, answer.text
            return answer.json()

        files = {"file": ("lines.jsonl", in_lines(lines))}
        file = ask("POST", "/v1/files", data={"purpose": "batch"}, files=files)
        wish = {"input_file_id": file["id"], "endpoint": ROUTE, "completion_window": "24h"}
        id = ask("POST", "/v1/batches", json=wish)["id"]
        for name in ("two", "one", "two"):  # other requests force swaps in the meantime
            ask("POST", ROUTE, json={"model": name, "prompt": "a", "max_tokens": 3})
        eventually(lambda: ask("GET", f"/v1/batches/{id}")["status"] == "completed", 240)
        batch = ask("GET", f"/v1/batches/{id}")
        assert batch["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
        found = results(http.get(f"/v1/files/{batch['output_file_id']}/content").content)
        assert Counter(it["custom_id"] for it in found) == Counter(it["custom_id"] for it in lines)
        asked = {it["custom_id"]: it["body"]["model"] for it in lines}
        answered = {it["custom_id"]: it["response"]["body"]["model"] for it in found}
        assert answered == asked
