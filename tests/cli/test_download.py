"""The line that shows a download."""

import sys

import pytest

from headrace.cli.download import DownloadLine


def test_without_a_terminal_there_is_a_line_per_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    show = DownloadLine("someone/model")
    for done in range(0, 1001):
        show(done << 20, 1000 << 20)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 11
    assert lines[5].startswith("Downloading someone/model: 50 % of 1000 MiB, ")
    assert "\r" not in "".join(lines)


def test_on_a_terminal_one_line_moves(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    show = DownloadLine("someone/model")
    show(1, 2)
    show(2, 2)
    shown = capsys.readouterr().err
    assert shown.count("\r") == 2 and shown.count("\n") == 1
