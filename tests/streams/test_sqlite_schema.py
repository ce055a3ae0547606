"""The database file at start: whole, damaged, older, newer."""

import contextlib
import logging
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.streams import sqlite_schema
from headrace.streams.sqlite_schema import MIGRATIONS, NAME, open_database
from headrace.streams.state_dir import StateDir, StateError


@pytest.fixture
def state(tmp_path: Path) -> Iterator[StateDir]:
    with contextlib.closing(StateDir(tmp_path)) as state:
        yield state


def fill(state: StateDir) -> None:
    """A database of several pages, all of them in the main file."""
    with contextlib.closing(open_database(state)) as connection:
        for n in range(50):
            connection.execute("INSERT INTO records VALUES (?, ?)", (n, b"x" * 1000))


def num_records(state: StateDir) -> int:
    with contextlib.closing(open_database(state)) as connection:
        return connection.execute("SELECT count(*) FROM records").fetchone()[0]


def overwrite(path: Path, start: int, length: int) -> None:
    with path.open("r+b") as file:
        file.seek(start)
        file.write(b"\xa5" * length)


def test_commits_are_synced(state: StateDir) -> None:
    with contextlib.closing(open_database(state)) as connection:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert connection.execute("PRAGMA synchronous").fetchone() == (2,)


def test_every_file_is_private(state: StateDir) -> None:
    with contextlib.closing(open_database(state)) as connection:
        connection.execute("INSERT INTO records VALUES (1, 'x')")
        modes = {file.name: file.stat().st_mode & 0o777 for file in state.path.iterdir()}
    assert modes == dict.fromkeys(["lock", NAME, NAME + "-wal", NAME + "-shm"], 0o600)


@pytest.mark.parametrize(("start", "length"), [(0, 100), (4096, 200), (4096 * 8, 4096)])
def test_a_damaged_database_is_moved_aside_and_named(
    state: StateDir, caplog: pytest.LogCaptureFixture, start: int, length: int
) -> None:
    fill(state)
    assert num_records(state) == 50
    overwrite(state.path / NAME, start, length)
    damaged = (state.path / NAME).read_bytes()
    with caplog.at_level(logging.WARNING):
        assert num_records(state) == 0
    (aside,) = state.path.glob("*.damaged-*")
    assert aside.name in caplog.text
    assert aside.read_bytes() == damaged


def test_a_damaged_database_takes_its_write_ahead_log_along(state: StateDir) -> None:
    (state.path / NAME).write_bytes(b"no database " * 1000)
    (state.path / (NAME + "-wal")).write_bytes(b"its log")
    assert num_records(state) == 0
    kept = sorted(file.read_bytes()[:7] for file in state.path.glob("*.damaged-*"))
    assert kept == [b"its log", b"no data"]


def test_a_newer_schema_is_refused_and_left_alone(state: StateDir) -> None:
    with contextlib.closing(open_database(state)) as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(StateError, match="newer Headrace"):
        open_database(state)
    assert not list(state.path.glob("*.damaged-*"))


def test_an_older_schema_is_brought_up_to_date(
    state: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(state)
    later = (*MIGRATIONS, ("ALTER TABLE records ADD COLUMN colour TEXT DEFAULT 'red'",))
    monkeypatch.setattr(sqlite_schema, "MIGRATIONS", later)
    for _ in range(2):
        with contextlib.closing(open_database(state)) as connection:
            assert connection.execute("SELECT colour FROM records").fetchone() == ("red",)
            assert connection.execute("PRAGMA user_version").fetchone() == (len(later),)


def test_a_migration_that_fails_changes_nothing(
    state: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(state)
    broken = (*MIGRATIONS, ("ALTER TABLE records ADD COLUMN colour TEXT", "no sql"))
    with monkeypatch.context() as patch, pytest.raises(StateError, match="syntax error"):
        patch.setattr(sqlite_schema, "MIGRATIONS", broken)
        open_database(state)
    assert num_records(state) == 50


def test_a_database_that_cannot_be_opened_is_no_damage(state: StateDir) -> None:
    (state.path / (NAME + "-wal")).mkdir()
    with pytest.raises(StateError, match="cannot be used"):
        open_database(state)
    assert not list(state.path.glob("*.damaged-*"))


def test_another_program_that_holds_the_database_is_no_damage(state: StateDir) -> None:
    fill(state)
    with contextlib.closing(sqlite3.connect(state.path / NAME)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StateError, match="locked"):
            open_database(state)
