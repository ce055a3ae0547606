"""Tests opening a database file that is intact, damaged, older or newer."""

import contextlib
import logging
import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace.streams.stores import sqlite_schema
from headrace.streams.stores.sqlite_schema import MIGRATIONS, NAME, open_database
from headrace.streams.stores.state_dir import StateDir, StateError


@pytest.fixture
def state(tmp_path: Path) -> Iterator[StateDir]:
    with contextlib.closing(StateDir(tmp_path)) as state:
        yield state


def fill(state: StateDir) -> None:
    """Create a database of several pages, all of them in the main file."""
    with contextlib.closing(open_database(state)) as connection:
        for n in range(50):
            connection.execute("INSERT INTO records VALUES (?, ?, x'00')", (n, b"x" * 1000))


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
        connection.execute("INSERT INTO records VALUES (1, 'x', x'00')")
        modes = {file.name: file.stat().st_mode & 0o777 for file in state.path.iterdir()}
    assert modes == dict.fromkeys(["lock", NAME, NAME + "-wal", NAME + "-shm"], 0o600)


@pytest.mark.parametrize(("start", "length"), [(0, 100), (18, 1), (4096, 200), (4096 * 8, 4096)])
def test_a_damaged_database_is_moved_aside_and_logged(
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


def test_the_write_ahead_log_of_a_damaged_database_is_moved_with_it(state: StateDir) -> None:
    (state.path / NAME).write_bytes(b"no database " * 1000)
    (state.path / (NAME + "-wal")).write_bytes(b"its log")
    assert num_records(state) == 0
    kept = sorted(file.read_bytes()[:7] for file in state.path.glob("*.damaged-*"))
    assert kept == [b"its log", b"no data"]


def test_a_newer_schema_is_refused_and_left_alone(state: StateDir) -> None:
    with contextlib.closing(open_database(state)) as connection:
        connection.execute("ALTER TABLE records ADD COLUMN colour TEXT")
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(StateError, match="newer version of Headrace"):
        open_database(state)
    assert not list(state.path.glob("*.damaged-*"))


def test_an_older_schema_is_migrated(state: StateDir, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(state)
    later = (*MIGRATIONS, ("ALTER TABLE records ADD COLUMN colour TEXT DEFAULT 'red'",))
    monkeypatch.setattr(sqlite_schema, "MIGRATIONS", later)
    for _ in range(2):
        with contextlib.closing(open_database(state)) as connection:
            assert connection.execute("SELECT colour FROM records").fetchone() == ("red",)
            assert connection.execute("PRAGMA user_version").fetchone() == (len(later),)


def test_a_wrong_schema_number_is_corrected(state: StateDir) -> None:
    fill(state)
    for noise in (99, 1, 0):
        with contextlib.closing(open_database(state)) as connection:
            connection.execute(f"PRAGMA user_version = {noise}")
        assert num_records(state) == 50


def test_a_database_with_altered_tables_is_moved_aside(state: StateDir) -> None:
    fill(state)
    path = state.path / NAME
    path.write_bytes(path.read_bytes().replace(b"next_seq INTEGER NOT", b"next_set INTEGER NOT"))
    assert num_records(state) == 0
    assert len(list(state.path.glob("*.damaged-*"))) == 1


def test_a_damaged_index_is_rebuilt(state: StateDir, caplog: pytest.LogCaptureFixture) -> None:
    with contextlib.closing(open_database(state)) as connection:
        connection.execute(
            "INSERT INTO streams (id, owner, epoch, next_seq, num_bytes, read_at) "
            "VALUES ('in the index', '', 1, 0, 0, 0)"
        )
    path = state.path / NAME
    data = path.read_bytes()
    assert data.count(b"in the index") == 2
    path.write_bytes(data[::-1].replace(b"xedni eht ni", b"xedni eht no", 1)[::-1])
    with contextlib.closing(open_database(state)) as connection:
        asked = "SELECT count(*) FROM streams WHERE id IN ('in the index', 'on the index')"
        assert connection.execute(asked).fetchone() == (1,)
    assert "rebuilt" in caplog.text


def in_place(state: StateDir, name: str, make: Callable[[Path], object]) -> list[str]:
    """Open a database after replacing one of its files; return the files moved aside."""
    make(state.path / name)
    open_database(state).close()
    return [path.name.partition(".unreadable")[0] for path in state.path.glob("*.unreadable-*")]


@pytest.mark.parametrize("name", [NAME, f"{NAME}-wal", f"{NAME}-shm"])
@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_anything_else_in_place_of_a_database_file_is_moved_aside(
    state: StateDir, name: str, make: Callable[[Path], object]
) -> None:
    assert in_place(state, name, make) == [name]


def test_an_invalid_write_ahead_log_is_moved_aside(state: StateDir) -> None:
    open_database(state).close()
    name = f"{NAME}-wal"
    assert in_place(state, name, lambda path: path.write_bytes(b"random" * 100)) == [name]


def test_checksums_are_added_to_a_database_without_them(state: StateDir) -> None:
    path = state.private_file(NAME)
    with contextlib.closing(sqlite3.connect(path)) as old:
        for statement in MIGRATIONS[0]:
            old.execute(str(statement))
        old.execute("INSERT INTO streams VALUES (1, 'a', '', NULL, NULL, 1, 0, 0, 0, NULL)")
        old.execute("INSERT INTO records VALUES (1, x'80')")
        old.execute("INSERT INTO batches VALUES (1, 0, x'90')")
        old.commit()
    with contextlib.closing(open_database(state)) as connection:
        for table in ("streams", "records", "batches"):
            (given,) = connection.execute(f"SELECT checksum FROM {table}").fetchone()
            assert len(given) == 8


def test_a_failed_migration_changes_nothing(
    state: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(state)
    broken = (*MIGRATIONS, ("ALTER TABLE records ADD COLUMN colour TEXT", "no sql"))
    with monkeypatch.context() as patch, pytest.raises(StateError, match="syntax error"):
        patch.setattr(sqlite_schema, "MIGRATIONS", broken)
        open_database(state)
    assert num_records(state) == 50


def test_a_database_that_cannot_be_opened_is_not_treated_as_damaged(
    state: StateDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite_schema, "make_way", lambda path: None)
    (state.path / (NAME + "-wal")).mkdir()
    with pytest.raises(StateError, match="cannot be used"):
        open_database(state)
    assert not list(state.path.glob("*.damaged-*"))


def test_a_locked_database_is_not_treated_as_damaged(state: StateDir) -> None:
    fill(state)
    with contextlib.closing(sqlite3.connect(state.path / NAME)) as other:
        other.execute("PRAGMA locking_mode = EXCLUSIVE")
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(StateError, match="locked"):
            open_database(state)
