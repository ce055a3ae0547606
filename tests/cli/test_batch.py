"""`headrace batch`: where its results go."""

from pathlib import Path

import pytest

from headrace.cli.batch import _written, check_output
from headrace_common.errors import ConfigError


def test_results_that_could_not_be_written_are_told_before_a_line_is_answered(
    tmp_path: Path,
) -> None:
    check_output(tmp_path / "a.jsonl")
    with pytest.raises(ConfigError, match="is a folder; give a file"):
        check_output(tmp_path)
    with pytest.raises(ConfigError, match="nowhere is not there; make it"):
        check_output(tmp_path / "nowhere" / "a.jsonl")


def test_results_that_did_not_come_whole_leave_no_file(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), _written(tmp_path / "a.jsonl") as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())
    with _written(tmp_path / "a.jsonl") as file:
        file.write(b"all")
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]
