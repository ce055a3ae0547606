"""`headrace batch`: where its results go."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.cli.batch import _follow, _written, check_output
from headrace_common.errors import ConfigError


def test_results_that_could_not_be_written_are_told_before_a_line_is_answered(
    tmp_path: Path,
) -> None:
    check_output(tmp_path / "a.jsonl")
    with pytest.raises(ConfigError, match="is a folder; give a file"):
        check_output(tmp_path)
    with pytest.raises(ConfigError, match="nowhere does not exist; create it"):
        check_output(tmp_path / "nowhere" / "a.jsonl")


def test_results_that_did_not_come_whole_leave_no_file(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), _written(tmp_path / "a.jsonl") as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())
    with _written(tmp_path / "a.jsonl") as file:
        file.write(b"all")
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def batch(status: str, completed: int) -> dict[str, Any]:
    counts = {"completed": completed, "failed": 0, "total": 1000}
    files = {"output_file_id": None, "error_file_id": None, "errors": None}
    return {"id": "batch-1", "status": status, "request_counts": counts, **files}


def test_without_a_terminal_a_batch_is_one_line_per_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def follow(first: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield first
        yield from (batch("in_progress", number) for number in range(1000))
        yield batch("completed", 1000)

    client = SimpleNamespace(follow=follow, results=lambda file_id: ())
    assert _follow(client, batch("validating", 0), tmp_path / "out") == 0  # type: ignore[arg-type]
    assert capsys.readouterr().err.splitlines()[:-1] == [
        "headrace: batch-1: validating, 0 % (0 of 1,000 lines)...",
        "headrace: batch-1: in_progress, 0 % (0 of 1,000 lines)...",
        "batch-1: completed, 100 % (1,000 of 1,000 lines)",
    ]
