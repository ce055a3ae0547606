"""Tests state files that were damaged or replaced by a pipe or a folder."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace_common.system.state_files import MARK, make_folder, read_kept


def make_link(path: Path, to: str) -> None:
    path.symlink_to(to)


SPOILED: dict[str, Callable[[Path], object]] = {
    "a folder": Path.mkdir,
    "an empty file": Path.touch,
    "random bytes": lambda path: path.write_bytes(os.urandom(1000)),
    "a pipe": os.mkfifo,
    "endless zeros": lambda path: make_link(path, "/dev/zero"),
    "a broken link": lambda path: make_link(path, "/nowhere/at/all"),
    "a link to itself": lambda path: make_link(path, path.name),
    "too much": lambda path: path.write_bytes(bytes(5000)),
}


def number(content: bytes) -> int:
    return int(content.decode())


@pytest.mark.parametrize("what", SPOILED)
def test_an_unreadable_state_file_is_moved_aside_once(what: str, tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    SPOILED[what](path)
    assert read_kept(path, number, 4096) is None
    (aside,) = tmp_path.iterdir()
    assert aside.name.startswith(f"kept.json{MARK}")
    assert read_kept(path, number, 4096) is None and list(tmp_path.iterdir()) == [aside]


def test_a_readable_state_file_stays(tmp_path: Path) -> None:
    (tmp_path / "kept.json").write_text("7")
    assert read_kept(tmp_path / "kept.json", number, 4096) == 7
    assert [path.name for path in tmp_path.iterdir()] == ["kept.json"]


def test_a_state_folder_is_private_and_replaces_a_file(tmp_path: Path) -> None:
    (tmp_path / "batches").write_text("a file")
    make_folder(tmp_path / "batches")
    assert (tmp_path / "batches").stat().st_mode & 0o777 == 0o700
    (tmp_path / "batches").chmod(0o755)
    make_folder(tmp_path / "batches")
    assert (tmp_path / "batches").stat().st_mode & 0o777 == 0o700
    assert len(list(tmp_path.iterdir())) == 2
