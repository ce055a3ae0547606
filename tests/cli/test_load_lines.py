"""The progress of a load on stderr: a bar on a terminal, otherwise one line per stage."""

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import msgspec
import pytest

from headrace import LLM
from headrace.cli.load_lines import LoadLines, LoadView
from headrace_common.loading import COMPILING, DOWNLOADING, READING, LoadProgress
from tests.checkpoints.small_hub import small_hub
from tests.cli.terminal import terminal
from tools.harness.eventually import eventually
from tools.harness.tiny_models import make_tiny_model


class Shown:
    """A terminal of 80 columns whose output a test reads."""

    def __init__(self, fd: int, end: TextIO) -> None:
        self._fd, self.end = fd, end
        self.text = ""

    def read(self) -> str:
        while True:
            try:
                self.text += os.read(self._fd, 65536).decode()
            except BlockingIOError:
                return self.text


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Iterator[Shown]:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    ours, theirs = pty.openpty()
    os.set_blocking(ours, False)
    with open(theirs, "w", encoding="utf-8") as end:
        yield Shown(ours, end)
    os.close(ours)


def test_without_a_terminal_each_stage_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with LoadView() as view:
        for tenth in range(11):
            view(LoadProgress(DOWNLOADING, tenth / 10, "of 93 MiB", tenth, "small"))
        for seconds in range(100):
            view(LoadProgress(COMPILING, None, "", seconds, "small"))
        # Another model, and a stage that returns.
        view(LoadProgress(COMPILING, None, "", 0, "large"))
        view(LoadProgress(DOWNLOADING, 1.0, "of 93 MiB", 101, "small"))
    assert capsys.readouterr().err.splitlines() == [
        "headrace: small: downloading the model, 0 % of 93 MiB...",
        "headrace: small: compiling kernels...",
        "headrace: large: compiling kernels...",
    ]


def test_without_a_terminal_a_long_stage_is_shown_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr("headrace.cli.load_lines.time.monotonic", lambda: now)
    with LoadView() as view:
        for now in (0.0, 20.0, 31.0, 40.0):
            view(LoadProgress(COMPILING, now / 40, "", now, "small"))
    assert capsys.readouterr().err.splitlines() == [
        "headrace: small: compiling kernels, 0 %...",
        "headrace: small: compiling kernels, 78 % (31 s)...",
    ]


def test_a_second_load_shows_its_stages_again(capsys: pytest.CaptureFixture[str]) -> None:
    loading = [LoadProgress(READING)]
    with LoadLines(READING) as lines:
        lines.follow(lambda: loading)
        loading.clear()
        eventually(lambda: not lines._reported)
        loading.append(LoadProgress(READING))
        eventually(lambda: bool(lines._reported))
    said = capsys.readouterr().err.splitlines()
    assert said == ["headrace: reading the model's files..."] * 2


def test_on_a_terminal_one_bar_is_redrawn_and_disappears(
    shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr", shown.end)
    detail = "of 93 MiB, 3.2 MiB/s, 3 min 20 s left"
    with LoadView() as view:
        view(LoadProgress(DOWNLOADING, 0.1, detail))
        eventually(lambda: "10 % of 93 MiB, 3.2 MiB/s, 3 min 20 s left" in shown.read())
        view(LoadProgress(COMPILING, None, "", 41.0))
        eventually(lambda: "compiling kernels (41 s)" in shown.read())
        assert "\n" not in shown.text
    # The end moves one line down, and then up again to erase the bar.
    assert shown.read().count("\n") == 1
    assert shown.text.endswith("\x1b[?25h\r\x1b[1A\x1b[2K")


def test_a_model_in_the_callers_process_shows_its_load_too(
    shown: Shown, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = str(make_tiny_model(tmp_path / "model"))
    monkeypatch.setattr("sys.stderr", shown.end)
    LLM(folder, on_progress=lambda now: None, threads=1).close()
    assert not shown.read()
    LLM(folder, threads=1).close()
    assert READING in shown.read()
    assert shown.text.endswith("\x1b[?25h\r\x1b[1A\x1b[2K")


def test_a_long_line_is_cut_because_a_bar_must_not_wrap(
    shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr", shown.end)
    with LoadView() as view:
        view(LoadProgress(COMPILING, 0.5, "x" * 300))
        eventually(lambda: "…" in shown.read())
    assert "x" * 80 not in shown.text


@pytest.mark.parametrize("term", ["dumb", ""])
def test_a_terminal_that_cannot_redraw_gets_lines(
    term: str, shown: Shown, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", term)
    monkeypatch.setattr("sys.stderr", shown.end)
    with LoadView() as view:
        view(LoadProgress(COMPILING, 0.5))
        view(LoadProgress(COMPILING, 0.6))
    shown.read()
    assert shown.text.count("compiling kernels") == 1 and "━" not in shown.text


def test_a_program_gets_each_report_as_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(LoadView, "_is_for_program", False)
    LoadView.write_for_program()
    now = LoadProgress(DOWNLOADING, 0.1, "of 93 MiB", 2.5, "a\x1b[2J")
    with LoadView() as view:
        view(now)
        view(now)
    lines = capsys.readouterr().err.splitlines()
    assert [msgspec.json.decode(line, type=LoadProgress) for line in lines] == [now, now]


def test_pull_draws_a_bar_and_leaves_only_the_folder(tmp_path: Path) -> None:
    repo = make_tiny_model(tmp_path / "model")
    with small_hub({"someone/model": repo}) as hub:
        places = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hub"), "COLUMNS": "80"}
        hub.flows.clear()
        with terminal("pull", "someone/model", **places) as shown:
            shown.wait_for(r"someone/model: downloading the model, \d+ % of \d+ MiB")
            hub.flows.set()
            assert shown.wait_until_ended() == 0
        last = shown.raw.rpartition("\x1b[2K")[2]
        assert last.strip().startswith(str(tmp_path / "hub")) and last.count("\n") == 1
    listed = subprocess.run(
        [sys.executable, "-m", "headrace", "ls", "--json"],
        capture_output=True,
        env={**os.environ, **places},
    )
    assert json.loads(listed.stdout)[0]["folder"] == last.strip()
