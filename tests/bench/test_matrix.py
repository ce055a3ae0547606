"""Tests `bench matrix`: the grid, resuming from a file, and one real measurement."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from headrace.bench.figures import between_tokens
from headrace.bench.grid import CHUNKING, GRIDS, MixedLoad, server_flags
from headrace.bench.load import PromptSource
from headrace.bench.results import Conditions, MatrixRow, open_results, save
from headrace.cli.main import cli
from headrace_common.errors import ConfigError
from tests.bench.builders import make_cell, make_round
from tools.make_random_model import make_random_model

LOAD = MixedLoad(num_streams=2, rate=1.0, prompt_tokens=64, cached_share=0.5)
MADE = Conditions(
    model="it", flags=(), machine={"cores": 2}, revision="a", seed=0, num_prompts=2
)  # fmt: skip


def test_a_grid_has_every_combination_once() -> None:
    assert len(GRIDS["full"].loads()) == 54
    assert len(CHUNKING) * len(GRIDS["short"].loads()) == 12
    twice = msgspec.structs.replace(GRIDS["short"], rates=(1.0, 1.0), cached=(0.5,))
    assert [(it.prompt_tokens, it.rate) for it in twice.loads()] == [(4096, 1.0), (12288, 1.0)]


def test_a_server_without_chunking_takes_the_longest_prompt_in_one_step() -> None:
    flags = server_flags("off", GRIDS["full"])
    assert int(flags[flags.index("--max-step-tokens") + 1]) > max(GRIDS["full"].lengths)
    assert "--max-stall-ms" not in server_flags("time", GRIDS["full"])


def test_prompts_share_the_cached_prefix_and_are_equal_for_all_servers() -> None:
    first, second = (PromptSource("0 load", 100) for _ in range(2))
    beginning = first.begin_with(32)
    assert second.begin_with(32) == beginning
    prompts = [first.next(64) for _ in range(2)]
    assert prompts == [second.next(64) for _ in range(2)]
    assert [it[:32] for it in prompts] == [beginning] * 2 and prompts[0] != prompts[1]
    assert {len(it) for it in prompts} == {64}
    assert first.interval(1.0) == second.interval(1.0) > 0


def test_gaps_before_the_first_prompt_and_after_the_last_answer_are_left_out() -> None:
    cell = make_cell(make_round((0.5, 1.0, 1.5, 2.5, 3.0, 5.0, 9.0)))
    assert between_tokens(cell) == [1.0, 0.5, 2.0]


def test_a_file_is_continued_with_the_missing_cells(tmp_path: Path) -> None:
    file = tmp_path / "matrix.json"
    results = open_results(file, MADE, "first")
    results.rows.append(MatrixRow(chunking="off", load=LOAD, itl_ms={"p50": 1.0}))
    save(results, file)
    found = open_results(file, MADE, "second")
    assert found.rows == results.rows and found.commands == ["first", "second"]
    assert found.missing("off", [LOAD]) == [] and found.missing("time", [LOAD]) == [LOAD]
    assert [path.name for path in tmp_path.iterdir()] == ["matrix.json"]


@pytest.mark.parametrize("change", [{"revision": "b"}, {"seed": 1}, {"machine": {"cores": 4}}])
def test_cells_of_another_run_are_not_mixed_in(tmp_path: Path, change: dict[str, Any]) -> None:
    file = tmp_path / "matrix.json"
    save(open_results(file, MADE, "first"), file)
    with pytest.raises(ConfigError, match=f"was measured with {next(iter(change))} "):
        open_results(file, msgspec.structs.replace(MADE, **change), "second")


@pytest.mark.parametrize("text", ["", "[1]", '{"benchmark":"mixed","servers":[]}'])
def test_a_file_without_results_is_refused_and_kept(tmp_path: Path, text: str) -> None:
    file = tmp_path / "matrix.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match="no results of this benchmark"):
        open_results(file, MADE, "it")
    assert file.read_text() == text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "Give a MODEL to serve, or the --url"),
        (("it", "--url", "http://127.0.0.1:9"), "Give a MODEL to serve, or the --url"),
        (("--url", "it", "--chunking", "off,time"), "--url measures one server"),
        (("it", "--rates", "nan"), "'nan' is not a list of numbers"),
        (("it", "--rates", "1,0"), "0.0 is not in the range"),
        (("it", "--cached", "1"), "1.0 is not in the range"),
    ],
)
def test_a_wrong_grid_is_refused(words: tuple[str, ...], message: str) -> None:
    found = CliRunner().invoke(cli, ["bench", "matrix", *words])
    assert found.exit_code and message in found.output + str(found.exception)


@pytest.mark.slow
def test_a_cell_of_a_hybrid_is_measured_once_and_drawn(tmp_path: Path) -> None:
    model, file, plots = tmp_path / "model", tmp_path / "matrix.json", tmp_path / "plots"
    make_random_model(model, "tiny-hybrid", positions=8192)
    command = ["bench", "matrix", str(model), "--json", str(file), "--plot", str(plots)]
    command += ["--chunking", "tokens", "--streams", "1", "--rates", "20", "--lengths", "1100"]
    command += ["--cached", "0.5", "--prompts", "2", "--", "--threads", "1"]
    outputs = [CliRunner().invoke(cli, command, catch_exceptions=False) for _ in range(2)]
    assert [found.exit_code for found in outputs] == [0, 0], outputs
    assert "cell 1 of 1: tokens, 1 streams" in outputs[0].output
    assert "starting a server" not in outputs[1].output
    report = json.loads(file.read_text())
    (row,) = report["rows"]
    assert row["reasons"] == [] and row["evidence"]["num_mixed"] > 0
    assert row["ttft_ms"]["n"] == 2 and row["itl_ms"]["p99"] >= row["itl_ms"]["p50"] > 0
    assert row["ingestion"]["cached_tokens"] == 544
    engine = report["servers"]["tokens"]["engine"]
    assert (engine["stall_target_ms"], engine["max_step_tokens"]) == (None, 512)
    assert report["conditions"]["flags"] == ["--threads", "1"]
    assert sorted(path.name for path in plots.iterdir()) == ["matrix-p50.png", "matrix-p99.png"]
