"""Tests `bench mixed` with a tiny model in a real server."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from headrace.bench.mixed import _speed
from headrace.bench.report import gaps
from headrace.cli.main import cli, main
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
def test_prompts_during_streams_are_measured_and_plotted(model: Path, tmp_path: Path) -> None:
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


def test_a_model_that_does_not_run_packed_is_reported_as_a_gap() -> None:
    (gap,) = gaps({"memory": "slot", "mask": "lazy-prefix"})
    assert gap.keys() == {"id", "now", "advice", "why"} and gap["advice"] == "implement"
    assert gaps(None) == gaps({"memory": "blocks", "mask": "none"}) == []


@pytest.mark.slow
def test_a_measurement_without_a_slot_for_the_prompt_is_invalid(
    model: Path, tmp_path: Path
) -> None:
    with running_server(str(model), "--state-dir", "none", "--max-num-seqs", "4") as server:
        found = bench(server.url, tmp_path)
    assert found["cell"]["valid"] is False
    assert "no step processed prompt tokens together with all 4 streams" in found["cell"]["reasons"]
    assert "2 of 2 prompts had no first token while the streams ran" in found["cell"]["reasons"]
    assert "not valid" in found["output"]


@pytest.mark.slow
def test_a_server_with_speculation_is_measured_even_if_its_median_gap_is_0(
    tmp_path: Path,
) -> None:
    with running_server("headrace-mini", "--state-dir", "none") as server:
        found = bench(server.url, tmp_path)
    (shown,) = found["report"]["servers"]
    assert shown["calibration"]["ratio"] > 0
    assert "control: 4 streams" in found["output"] and "quick: 3 prompts" in found["output"]


def test_a_server_that_sends_all_tokens_at_once_has_no_ratio() -> None:
    assert _speed(0.0, 0.5, None) == (
        "– per token (No time passed between the tokens of the streams); "
        "prompt on the idle server: 0.50 s"
    )


def run_main(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *words: str
) -> tuple[int, list[str]]:
    monkeypatch.setattr(sys, "argv", ["headrace", "bench", "mixed", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    return int(str(ended.value.code)), capfd.readouterr().err.strip().splitlines()


def test_progress_is_shown_before_the_server_answers(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code, (first, last) = run_main(monkeypatch, capfd, "--url", "http://127.0.0.1:9")
    assert code == 1
    assert first == "127.0.0.1:9: measuring http://127.0.0.1:9 with the profile wall"
    assert last.startswith("headrace: No server answers (127.0.0.1:9: ")


def test_an_unwritable_result_path_is_refused_before_the_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    for place in (str(tmp_path), str(tmp_path / "file" / "it.json")):
        code, (line,) = run_main(monkeypatch, capfd, "--json", place)
        assert code == 2 and line.startswith("headrace: --json: ")
