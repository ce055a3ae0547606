"""Tests the shared prefix folder: permissions, removal and failures."""

import os
import time
from pathlib import Path

import pytest

from headrace_engine.prefixes import folder as folders
from headrace_engine.prefixes.folder import DAY_S, PrefixFolder, StoredFile, files_to_remove, sweep
from tests.prefixes.builders import file_of, make_folder, make_segment, numbers_of


def names(folder: PrefixFolder) -> set[str]:
    return {path.name.split("-")[0] for path in folder.path.glob("*-*")}


def test_only_its_user_may_read_the_folder(tmp_path: Path) -> None:
    folder, run = make_folder(tmp_path / "prefixes"), make_segment()
    folder.write(run, numbers_of(run))
    assert (tmp_path / "prefixes").stat().st_mode & 0o777 == 0o700
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert file_of(folder, run).stat().st_mode & 0o777 == 0o600


def test_a_parent_folder_with_other_files_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    tmp_path.chmod(0o755)
    folder = make_folder(tmp_path)
    assert tmp_path.stat().st_mode & 0o777 == 0o755
    assert folder.path.stat().st_mode & 0o777 == 0o700


def test_only_segments_are_listed(tmp_path: Path) -> None:
    folder, runs = make_folder(tmp_path), [make_segment(0, 2), make_segment(2, 4)]
    for run in runs:
        folder.write(run, numbers_of(run))
    for name in ("12-3", "x-1-2", "zz-1-2", "1-0.part"):
        (folder.path / name).touch()
    assert {one[:] for one in folder.stored()} == {(run.name, run.first, run.end) for run in runs}


def used(at: float, size: int, first: int, name: str = "") -> StoredFile:
    return StoredFile(name or f"{at}-{first}", at, size, first)


def test_the_least_recently_used_files_are_removed_first() -> None:
    now = 1e9
    old, middle, new = used(now - 9000, 10, 0), used(now - 6000, 10, 0), used(now - 1, 10, 0)
    assert files_to_remove([new, old, middle], 30, 1, now) == []
    assert files_to_remove([new, old, middle], 20, 1, now) == [old]
    assert files_to_remove([new, old, middle], 19, 1, now) == [old, middle]


def test_the_last_segments_of_a_prompt_are_removed_first() -> None:
    runs = [used(1e9 + 1e-3 * first, 10, first) for first in (0, 8, 16)]
    assert files_to_remove(runs, 20, 1, 1e9 + 60) == [runs[2]]
    assert files_to_remove(runs, 10, 1, 1e9 + 60) == [runs[2], runs[1]]


def test_files_unused_for_days_are_removed_although_there_is_space() -> None:
    now = 1e9
    fresh, stale = used(now - 1.9 * DAY_S, 10, 0), used(now - 2.1 * DAY_S, 10, 0)
    assert files_to_remove([fresh, stale], 1000, 2, now) == [stale]


def test_incomplete_files_of_a_killed_server_are_removed(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    fresh, stale = folder.path / "1-0.part", folder.path / "1-1.part"
    for path in (fresh, stale):
        path.write_bytes(b"half")
    os.utime(stale, (0, time.time() - 7200))
    assert sweep(tmp_path, lambda *_: 1000, 7) == 4
    assert fresh.exists() and not stale.exists()


def test_a_sweep_counts_the_files_of_all_models(tmp_path: Path) -> None:
    one, run = make_folder(tmp_path), make_segment()
    one.write(run, numbers_of(run))
    size = file_of(one, run).stat().st_size
    other = tmp_path / ("0" * 32)
    other.mkdir()
    (other / file_of(one, run).name).write_bytes(bytes(size))
    os.utime(other / file_of(one, run).name, (0, time.time() - 3600))
    assert sweep(tmp_path, lambda *_: 2 * size, 7) == 2 * size
    assert sweep(tmp_path, lambda *_: 2 * size - 1, 7) == size
    assert names(one) and not list(other.glob("*-*"))


def test_using_a_segment_makes_it_recent(tmp_path: Path) -> None:
    folder, kept, gone = make_folder(tmp_path), make_segment(token=1), make_segment(token=2)
    for run in (kept, gone):
        folder.write(run, numbers_of(run))
        os.utime(file_of(folder, run), (0, time.time() - 3600))
    folder.touch(kept)
    sweep(tmp_path, lambda *_: file_of(folder, kept).stat().st_size, 7)
    assert names(folder) == {kept.name.hex()}


def test_a_failed_write_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, run = make_folder(tmp_path), make_segment()

    def full(descriptor: int, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folders.os, "write", full)
    with pytest.raises(OSError, match="No space"):
        folder.write(run, numbers_of(run))
    assert [path.name for path in folder.path.iterdir()] == [folders.ABOUT]


def test_clearing_keeps_foreign_files(tmp_path: Path) -> None:
    (tmp_path / "mine").touch()
    folder, run = make_folder(tmp_path), make_segment()
    folder.write(run, numbers_of(run))
    size = file_of(folder, run).stat().st_size
    assert folders.clear(tmp_path) == (1, size)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
