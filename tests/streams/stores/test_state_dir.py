"""Tests that the state directory is private and used by one server only."""

from pathlib import Path

import pytest

from headrace.streams.stores import state_dir
from headrace.streams.stores.state_dir import StateDir, StateError, StateInUse


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_new_directory_and_its_files_are_private(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "deep" / "state")
    file = state.private_file("x")
    assert (mode(state.path), mode(file), mode(state.path / "lock")) == (0o700, 0o600, 0o600)
    state.close()


def test_the_parents_of_new_directories_are_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Otherwise a power failure could lose the whole state directory of a new server.
    synced = list[Path]()
    monkeypatch.setattr(state_dir, "sync_folder", synced.append)
    for _ in range(2):
        StateDir(tmp_path / "deep" / "state").close()
    assert sorted(synced) == [tmp_path, tmp_path / "deep"]


def test_a_state_directory_readable_by_others_is_made_private(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    StateDir(tmp_path).close()
    assert mode(tmp_path) == 0o700
    tmp_path.chmod(0o755)
    (tmp_path / "x").touch(0o644)
    state = StateDir(tmp_path)
    state.private_file("x")
    assert (mode(tmp_path), mode(tmp_path / "x")) == (0o700, 0o600)
    state.close()


def test_a_directory_with_other_files_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    tmp_path.chmod(0o755)
    StateDir(tmp_path).close()
    assert mode(tmp_path) == 0o755


def test_a_second_server_in_the_same_directory_is_refused(tmp_path: Path) -> None:
    first = StateDir(tmp_path)
    with pytest.raises(StateInUse, match="--state-dir") as refused:
        StateDir(tmp_path)
    assert refused.value.code == "state_in_use"
    first.close()
    StateDir(tmp_path).close()


def test_a_state_dir_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StateError, match="File exists"):
        StateDir(tmp_path / "file")
