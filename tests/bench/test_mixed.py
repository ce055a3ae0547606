"""The benchmark as a user runs it, on a tiny model in a real server."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from headrace.bench.report import gaps
from headrace.cli.main import cli
from tools.harness.servers import running_server
from tools.harness.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def bench(url: str, folder: Path, *flags: str) -> dict[str, Any]:
    file = folder / "mixed.json"
    command = ["bench", "mixed", "--quick", "--url", f"it={url}", "--json", str(file), *flags]
    found = CliRunner().invoke(cli, command, catch_exceptions=False)
    assert found.exit_code == 0, found.output
    report = json.loads(file.read_text())
    (cell,) = report["servers"][0]["cells"]
    return {"report": report, "cell": cell, "output": found.output}


@pytest.mark.slow
def test_prompts_beside_streams_are_measured_and_drawn(model: Path, tmp_path: Path) -> None:
    with running_server(str(model), "--state-dir", "none") as server:
        found = bench(server.url, tmp_path, "--plot", str(tmp_path / "plots"))
    cell, (server_shown,) = found["cell"], found["report"]["servers"]
    assert cell["valid"], cell["reasons"]
    assert cell["evidence"]["num_mixed"] > 0
    assert cell["figures"]["ttft_ms"]["n"] == 2
    assert cell["figures"]["gaps_ms"]["stall"]["n"] > 0
    assert server_shown["controls"][0]["figures"]["gaps_ms"]["baseline"]["n"] > 0
    assert server_shown["server"]["engine"]["stall_target_ms"] == 200
    assert server_shown["ingestion"]["strategy"] == "native-text"
    assert server_shown["ingestion"]["memory"] == "blocks"
    assert server_shown["gaps"] == gaps(server_shown["ingestion"])
    assert found["report"]["machine"]["cores"] > 0
    plots = sorted(path.name for path in (tmp_path / "plots").iterdir())
    assert plots == ["gaps-quick.png", "worst-gap.png"]


def test_a_model_that_does_not_run_packed_is_a_gap() -> None:
    (gap,) = gaps({"memory": "slot", "mask": "lazy-prefix"})
    assert gap.keys() == {"id", "now", "advice", "why"} and gap["advice"] == "implement"
    assert gaps(None) == gaps({"memory": "blocks", "mask": "none"}) == []


@pytest.mark.slow
def test_a_server_without_a_place_for_the_prompt_is_found_invalid(
    model: Path, tmp_path: Path
) -> None:
    with running_server(str(model), "--state-dir", "none", "--max-num-seqs", "4") as server:
        found = bench(server.url, tmp_path)
    assert found["cell"]["valid"] is False
    assert "no step had prompt tokens beside all 4 streams" in found["cell"]["reasons"]
    assert "2 of 2 prompts had no first token while the streams ran" in found["cell"]["reasons"]
    assert "not valid" in found["output"]


def test_a_server_that_is_not_there_is_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    found = CliRunner().invoke(cli, ["bench", "mixed", "--url", "http://127.0.0.1:9"])
    assert found.exit_code == 1
    assert len((found.stderr + capfd.readouterr().err).strip().splitlines()) == 1
