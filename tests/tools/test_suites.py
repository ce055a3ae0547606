"""Suites are found by name; environments are built only when their inputs have changed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools import suites

ROOT = Path(__file__).parents[2]


def test_what_suites_and_environments_need_exists() -> None:
    entries = [*suites.SUITES.values(), *suites.ENVIRONMENTS.values()]
    needed = {name for entry in entries for name in entry.get("needs", [])}
    assert needed <= suites.ENVIRONMENTS.keys()


def test_an_unknown_name_lists_all_suites() -> None:
    ran = subprocess.run(
        [sys.executable, "tools/suites.py", "nothing"], cwd=ROOT, capture_output=True, text=True
    )
    assert ran.returncode == 2 and all(name in ran.stdout for name in suites.SUITES)


def test_variables_reach_the_command_and_quotes_survive(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ARGS", "-m 'not slow'")
    monkeypatch.setenv("KILLS", "7")
    suites.shell("printf '<%s>' $KILLS $SECONDS $SEED $ARGS", {"KILLS": "50", "SECONDS": "120"})
    assert capfd.readouterr().out == "<7><120><0><-m><not slow>"


def test_a_failing_command_ends_with_its_exit_code() -> None:
    with pytest.raises(SystemExit) as failed:
        suites.shell("exit 3")
    assert failed.value.code == 3


def test_an_environment_is_built_again_only_after_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    (tmp_path / "pins.txt").write_text("a")
    subprocess.run(["git", "add", "pins.txt"], cwd=tmp_path, check=True)
    monkeypatch.setattr(suites, "ROOT", tmp_path)
    command = "echo built >> log && mkdir -p made"
    base = {"ready": "made/base", "inputs": ["pins.txt"], "command": command}
    above = {"ready": "made/above", "needs": ["base"], "command": command}
    monkeypatch.setattr(suites, "ENVIRONMENTS", {"base": base, "above": above})

    suites.install("above")
    suites.install("above")
    assert (tmp_path / "log").read_text() == "built\n" * 2
    later = (tmp_path / "made/above").stat().st_mtime + 1
    os.utime(tmp_path / "pins.txt", (later, later))
    suites.install("above")
    assert (tmp_path / "log").read_text() == "built\n" * 4
