"""Opens the database file: checks the file, migrates an old schema, moves a damaged file aside."""

import contextlib
import logging
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from headrace.streams.stores.sqlite_rows import seal_all
from headrace.streams.stores.state_dir import StateDir, StateError
from headrace_common.system.state_files import make_way, move_aside

logger = logging.getLogger(__name__)

NAME = "streams.sqlite3"

_DATABASE = b"SQLite format 3\0"
_LOGS = (bytes.fromhex("377f0682"), bytes.fromhex("377f0683"))
"""The first bytes of a database file and of a write-ahead log."""

Step = str | Callable[[sqlite3.Connection], None]

MIGRATIONS: tuple[tuple[Step, ...], ...] = (
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
        # The record is stored apart from the stream's row, because every append rewrites the row.
        "CREATE TABLE records (n INTEGER PRIMARY KEY, record BLOB NOT NULL)",
        """CREATE TABLE batches (
            n INTEGER NOT NULL,
            first_seq INTEGER NOT NULL,
            events BLOB NOT NULL,
            PRIMARY KEY (n, first_seq)
        ) WITHOUT ROWID""",
    ),
    (
        "ALTER TABLE streams ADD COLUMN checksum BLOB",
        "ALTER TABLE records ADD COLUMN checksum BLOB",
        "ALTER TABLE batches ADD COLUMN checksum BLOB",
        seal_all,
    ),
    (
        # The rows of this table have no checksum. A damaged row points to a stream of another
        # owner or to a stream without the item. Such a stream is refused.
        """CREATE TABLE items (
            owner TEXT NOT NULL,
            item TEXT NOT NULL,
            n INTEGER NOT NULL,
            PRIMARY KEY (owner, item, n)
        ) WITHOUT ROWID""",
        "CREATE INDEX items_of_streams ON items (n)",
    ),
)
"""Migrations from each version of the schema to the next version.

The first migration starts with an empty database. Each migration must change a table, because the
version is recognized by the tables: a stored version number may be damaged.
"""

_CANNOT = {
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_PERM,
}
"""Errors of the machine; the database may be intact. Any other error means damage."""

_READ_ONLY = {sqlite3.SQLITE_READONLY_DIRECTORY, sqlite3.SQLITE_READONLY_CANTINIT}


class _Damaged(Exception):
    """Raised when the file is not a usable database of this store."""


def open_database(state: StateDir) -> sqlite3.Connection:
    """Return the writer's connection to an undamaged database of the current schema."""
    path = state.private_file(NAME)
    for suffix in ("-wal", "-shm", "-journal"):
        make_way(path.with_name(path.name + suffix))
    _check_wal(path)
    try:
        return _open_whole(path)
    except _Damaged:
        _move_aside(path)
    return _open_whole(state.private_file(NAME))


def _check_wal(database: Path) -> None:
    """Move the `-wal` file aside if it is not a write-ahead log.

    SQLite would silently overwrite such a file. If the database itself is damaged, the `-wal` file
    stays for now and is moved aside together with the database.
    """
    log = database.with_name(f"{database.name}-wal")
    if _begin(database) == _DATABASE and (magic := _begin(log)[:4]) and magic not in _LOGS:
        move_aside(log, "it is not a write-ahead log; streams may lack their latest events")


def _begin(path: Path) -> bytes:
    if not path.exists():
        return b""
    with path.open("rb") as file:
        return file.read(len(_DATABASE))


def connect(path: Path) -> sqlite3.Connection:
    """Connect to the database. Only one thread at a time may use a connection.

    Statements are not committed automatically inside a transaction.
    """
    connection = sqlite3.connect(path, timeout=0.25, isolation_level=None, check_same_thread=False)
    connection.text_factory = _to_text
    connection.execute("PRAGMA synchronous = FULL")
    # On some systems fsync alone does not reach the disk.
    connection.execute("PRAGMA fullfsync = ON")
    return connection


def _to_text(data: bytes) -> str:
    # Altered text must not make the query fail for other rows.
    return data.decode(errors="replace")


def _open_whole(path: Path) -> sqlite3.Connection:
    try:
        with _judged():
            connection = connect(path)
        try:
            with _judged():
                connection.execute("PRAGMA journal_mode = WAL")
                _check(connection)
                version = _version(connection)
            _migrate(connection, version)
        except BaseException:
            connection.close()
            raise
    except sqlite3.Error as error:
        raise StateError(f"The state directory cannot be used: {error}.") from error
    return connection


@contextlib.contextmanager
def _judged() -> Iterator[None]:
    """Turn an error of SQLite into _Damaged, unless the machine failed."""
    try:
        yield
    except sqlite3.Error as error:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
        cannot = code & 0xFF in _CANNOT or code in _READ_ONLY
        if cannot and code != sqlite3.SQLITE_IOERR_SHORT_READ:
            raise
        raise _Damaged from error
    # SQLite may quote undecodable table names in an error message.
    except UnicodeDecodeError as error:
        raise _Damaged from error


def _check(connection: sqlite3.Connection) -> None:
    """Read every page, so that damage shows now and not in the middle of a stream."""
    if connection.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
        raise _Damaged
    if connection.execute("PRAGMA integrity_check(1)").fetchone() != ("ok",):
        logger.warning("The indexes of the stream database were damaged and are rebuilt")
        connection.execute("REINDEX")
    connection.execute("BEGIN IMMEDIATE")
    # This statement fails if a damaged header forbids writing.
    connection.execute("PRAGMA user_version = 0")
    connection.rollback()


def _version(connection: sqlite3.Connection) -> int:
    """Return how many migrations have made these tables."""
    tables = _tables(connection)
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as blank:
        for version, migration in enumerate((*MIGRATIONS, ())):
            if _tables(blank) == tables:
                return version
            _apply(blank, migration)
    number: int = connection.execute("PRAGMA user_version").fetchone()[0]
    if number <= len(MIGRATIONS):
        raise _Damaged
    raise StateError(
        f"The state directory was written by a newer version of Headrace (schema {number}; this "
        f"version supports schema {len(MIGRATIONS)}). Use the newer version, or choose another "
        "directory with --state-dir."
    )


def _tables(connection: sqlite3.Connection) -> list[tuple[str, ...]]:
    return connection.execute(
        "SELECT type, name, tbl_name, sql FROM sqlite_master "
        "WHERE name NOT LIKE 'sqlite_%' ORDER BY name"
    ).fetchall()


def _migrate(connection: sqlite3.Connection, version: int) -> None:
    number = connection.execute("PRAGMA user_version").fetchone()[0]
    if number == version == len(MIGRATIONS):
        return
    connection.execute("BEGIN IMMEDIATE")
    for migration in MIGRATIONS[version:]:
        _apply(connection, migration)
    connection.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")
    connection.commit()


def _apply(connection: sqlite3.Connection, migration: tuple[Step, ...]) -> None:
    for step in migration:
        if isinstance(step, str):
            connection.execute(step)
        else:
            step(connection)


def _move_aside(path: Path) -> None:
    aside = path.with_name(f"{path.name}.damaged-{time.time_ns()}")
    logger.warning("The stream database is damaged; it is kept as %s", aside.name)
    for suffix in ("-wal", ""):
        part = path.with_name(path.name + suffix)
        if part.exists():
            part.rename(aside.with_name(aside.name + suffix))
    path.with_name(path.name + "-shm").unlink(missing_ok=True)
