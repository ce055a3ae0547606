"""The database file: opened, checked, brought to today's schema; a damaged one is moved aside."""

import logging
import sqlite3
import time
from pathlib import Path

from headrace.streams.state_dir import StateDir, StateError

logger = logging.getLogger(__name__)

NAME = "streams.sqlite3"

MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """CREATE TABLE streams (
            n INTEGER PRIMARY KEY AUTOINCREMENT,  -- never used again: an old log reads no new one
            id TEXT NOT NULL UNIQUE,
            owner TEXT NOT NULL,
            conversation TEXT,  -- null: none, or a newer stream took it over
            key TEXT,  -- null: none, or free again
            epoch INTEGER NOT NULL,  -- of the writer
            next_seq INTEGER NOT NULL,
            num_bytes INTEGER NOT NULL,
            read_at REAL NOT NULL,  -- unix seconds
            ended_at REAL  -- null: live
        )""",
        """CREATE UNIQUE INDEX conversations ON streams (owner, conversation)
            WHERE conversation IS NOT NULL""",
        "CREATE UNIQUE INDEX keys ON streams (owner, key) WHERE key IS NOT NULL",
        "CREATE INDEX live ON streams (n) WHERE ended_at IS NULL",
        # beside the stream's row, which every append rewrites
        "CREATE TABLE records (n INTEGER PRIMARY KEY, record BLOB NOT NULL)",
        """CREATE TABLE batches (
            n INTEGER NOT NULL,
            first_seq INTEGER NOT NULL,
            events BLOB NOT NULL,
            PRIMARY KEY (n, first_seq)
        ) WITHOUT ROWID""",
    ),
)
"""What leads from each version of the schema to the next; the first begins with nothing."""

_DAMAGE = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}


def open_database(state: StateDir) -> sqlite3.Connection:
    """The connection of the writer, to a database that is whole and of today's schema."""
    path = state.private_file(NAME)
    try:
        return _open_whole(path)
    except sqlite3.DatabaseError as error:
        if error.sqlite_errorcode & 0xFF not in _DAMAGE:
            raise StateError(f"The state directory cannot be used: {error}.") from error
    _move_aside(path)
    return _open_whole(state.private_file(NAME))


def connect(path: Path) -> sqlite3.Connection:
    """Each connection is used by one thread at a time; statements commit when told to."""
    connection = sqlite3.connect(path, timeout=0.25, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA fullfsync = ON")  # where fsync alone does not reach the disk
    return connection


def _open_whole(path: Path) -> sqlite3.Connection:
    connection = connect(path)
    try:
        connection.execute("PRAGMA journal_mode = WAL")
        _check(connection)
        _migrate(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def _check(connection: sqlite3.Connection) -> None:
    """Reads every page: damage must show now, not in the middle of somebody's stream."""
    if connection.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
        damage = sqlite3.DatabaseError("database disk image is malformed")
        damage.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
        raise damage


def _migrate(connection: sqlite3.Connection) -> None:
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    if version > len(MIGRATIONS):
        raise StateError(
            f"The state directory was written by a newer Headrace (schema {version}, this one "
            f"knows {len(MIGRATIONS)}); use that one, or another directory with --state-dir."
        )
    connection.execute("BEGIN IMMEDIATE")
    for statements in MIGRATIONS[version:]:
        for statement in statements:
            connection.execute(statement)
    connection.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")
    connection.commit()


def _move_aside(path: Path) -> None:
    aside = path.with_name(f"{path.name}.damaged-{time.time_ns()}")
    logger.warning("The database of streams is damaged; it is kept as %s", aside.name)
    for suffix in ("-wal", ""):
        part = path.with_name(path.name + suffix)
        if part.exists():
            part.rename(aside.with_name(aside.name + suffix))
    path.with_name(path.name + "-shm").unlink(missing_ok=True)
