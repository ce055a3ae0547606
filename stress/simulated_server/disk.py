"""The disk of a machine: what a power cut leaves of it, and how writing fails.

A power cut leaves only what was synced: the content of a file after `os.fsync` of the file, its
name after `os.fsync` of the folder. The rest is lost, kept or torn. SQLite syncs by itself, so its
settings decide what a commit has synced.
"""

import asyncio
import contextlib
import errno
import gc
import json
import os
import shutil
import sqlite3
import stat
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import greenlet
import msgspec
from detangle import choice, flip, randint, uniform

from headrace.streams.events import AnyEvent
from headrace.streams.stores.sqlite_schema import NAME
from stress.simulated_server.faults import Faults
from stress.simulated_server.system import sleep

if TYPE_CHECKING:
    from stress.simulated_server.world import World

_FULL = 2
_SYNC_S = (0.0002, 0.004)
_BLOCK = 512
_NEED_NO_SPACE = {"SELECT", "BEGIN", "unlink", "truncate"}
_FAILURES = {
    "full": (errno.ENOSPC, sqlite3.SQLITE_FULL, "database or disk is full"),
    "broken": (errno.EIO, sqlite3.SQLITE_IOERR, "disk I/O error"),
}
_BATCHES = "SELECT id, events FROM streams JOIN batches USING (n) ORDER BY n, first_seq"
_connect = sqlite3.connect
_disks: "list[Disk]" = []


class _File:
    """A file under any of its names. `synced` is its content at the last sync; None: never."""

    __slots__ = ("synced",)

    def __init__(self, synced: bytes | None = None) -> None:
        self.synced = synced


_Names = dict[str, _File | None]
"""The names in a folder at its last sync; None stands for a folder."""


class Disk:
    """The files of a machine. `folder` has the files of the server that runs now."""

    def __init__(self, folder: Path, faults: Faults) -> None:
        self.folder = folder
        self.faults = faults
        # "full", "broken" or "stalled" while the disk fails.
        self.trouble = ""
        # The connection whose commit is being synced.
        self.committing: SimConnection | None = None
        # Called at the start of each commit's sync.
        self.on_commit: Callable[[], None] = lambda: None
        self._names: dict[str, _Names] = {}
        self._files: dict[int, _File] = {}
        # Files of a database whose commits are not synced, as they were at the last sync.
        self._unsynced: dict[str, bytes] = {}
        folder.mkdir(parents=True)
        _disks.append(self)

    def holds(self, path: object) -> bool:
        """Return whether this path is below the folder of the running server."""
        return isinstance(path, str | Path) and str(path).startswith(f"{self.folder}/")

    def synced(self, descriptor: int, path: str) -> None:
        """Notice the sync of a file or a folder."""
        found = os.fstat(descriptor)
        if stat.S_ISDIR(found.st_mode):
            self._sync_names(os.path.relpath(path, self.folder))
        else:
            self._file(found.st_ino).synced = Path(path).read_bytes()

    def committed(self, connection: "SimConnection", before: dict[str, bytes]) -> None:
        """Notice a commit. SQLite syncs a new log's folder, and then the log after each commit."""
        if connection.synchronous < _FULL:
            for name, content in before.items():
                self._unsynced.setdefault(name, content)
        elif f"{NAME}-wal" not in self._names.get(".", {}):
            self._sync_names(".")

    def files_of_database(self) -> dict[str, bytes]:
        """Return the content of the database and its log."""
        paths = [self.folder / name for name in (NAME, f"{NAME}-wal")]
        return {path.name: path.read_bytes() for path in paths if path.exists()}

    def after_kill(self, folder: Path) -> None:
        """Move on to a copy of all files: the dead server has the old files open."""
        cut_log = self._end_commit()
        # If a connection of the dead server was collected now, SQLite would remove a file.
        gc.disable()
        shutil.copytree(self.folder, folder)
        if cut_log is not None:
            (folder / f"{NAME}-wal").write_bytes(cut_log)
        files = {}
        for path in self.folder.rglob("*"):
            if (file := self._files.get(path.stat().st_ino)) is not None:
                files[(folder / path.relative_to(self.folder)).stat().st_ino] = file
        gc.enable()
        self.folder, self._files = folder, files

    def after_power_cut(self, folder: Path) -> None:
        """Move on to what a power cut leaves of all files."""
        cut_log = self._end_commit()
        chance = choice((0.0, 0.5, 1.0))
        self._leave(".", folder, lambda: chance > 0.0 and flip(chance))
        log = folder / f"{NAME}-wal"
        if cut_log is not None and log.exists():
            log.write_bytes(cut_log)
        for name, content in self._unsynced.items():
            (folder / name).write_bytes(content)
        self._unsynced, self._files, self._names, self.folder = {}, {}, {}, folder
        for path in (folder, *folder.rglob("*")):
            if path.is_dir():
                self._sync_names(str(path.relative_to(folder)))
            elif not path.name.startswith(NAME):
                self._file(path.stat().st_ino).synced = path.read_bytes()

    def _leave(self, inside: str, to: Path, keeps: Callable[[], bool]) -> None:
        """Write to `to` what a power cut leaves of one folder."""
        to.mkdir()
        current = self._current(inside)
        durable = self._names.get(inside, {})
        for name in sorted(current.keys() | durable.keys()):
            is_sure = name in current and name in durable and current[name] is durable[name]
            source = current if is_sure or keeps() else durable
            if name not in source or name == f"{NAME}-shm":
                continue
            path, file = os.path.normpath(os.path.join(inside, name)), source[name]
            if file is None:
                self._leave(path, to / name, keeps)
            elif name.startswith(NAME):
                shutil.copy(self.folder / path, to / name)
            else:
                held = name in current and current[name] is file
                now = (self.folder / path).read_bytes() if held else file.synced or b""
                (to / name).write_bytes(_left_of(file.synced or b"", now, keeps))

    def _current(self, inside: str) -> _Names:
        with os.scandir(self.folder / inside) as entries:
            return {
                it.name: None if it.is_dir() else self._file(it.inode())
                for it in entries
                if it.is_dir() or it.is_file()
            }

    def _file(self, number: int) -> _File:
        return self._files.setdefault(number, _File())

    def _sync_names(self, inside: str) -> None:
        self._names[os.path.normpath(inside)] = self._current(inside)

    def _end_commit(self) -> bytes | None:
        """End a commit that the kill or the power cut interrupts.

        Returns the log if the commit is written partly, else None.
        """
        connection, self.committing = self.committing, None
        if connection is None or flip(0.3):
            return None
        self.faults.note("disk: commit interrupted")
        before = self.files_of_database()
        connection.commit_now()
        after = self.files_of_database()
        self.committed(connection, before)
        log = f"{NAME}-wal"
        # SQLite has synced the log before it changes the database.
        if flip(0.3) or before[NAME] != after[NAME] or log not in after:
            return None
        self.faults.note("disk: torn commit")
        return _torn(before.get(log, b""), after[log])

    # The methods below fail or wait as the disk does.

    def fail(self, name: str) -> None:
        """Wait while the disk is stalled; raise OSError if this operation fails."""
        while self.trouble == "stalled" and _is_thread():
            sleep(0.5)
        if kind := self._failure(name):
            number, _, _ = _FAILURES[kind]
            self.faults.note(f"disk: {kind}: {name}")
            raise OSError(number, os.strerror(number))

    def fail_sql(self, name: str) -> None:
        """Wait while the disk is stalled; raise an error of SQLite if this operation fails."""
        while self.trouble == "stalled" and name == "commit" and _is_thread():
            sleep(0.5)
        if kind := self._failure(name):
            _, code, message = _FAILURES[kind]
            self.faults.note(f"disk: {kind}: {name}")
            error = sqlite3.OperationalError(message)
            error.sqlite_errorcode = code
            raise error

    def _failure(self, name: str) -> str:
        """Return how this operation fails, or an empty text."""
        # Only threads fail, because a server does not start on a failing disk.
        if not _is_thread():
            return ""
        if self.faults.hits("disk: single error"):
            kind = choice(("full", "broken"))
        else:
            kind = self.trouble if self.trouble in _FAILURES and flip(0.7) else ""
        return "" if kind == "full" and name in _NEED_NO_SPACE else kind


class SimConnection(sqlite3.Connection):
    """A connection whose writes take time and fail, as its disk does."""

    def use(self, disk: Disk) -> None:
        self._disk = disk
        self.synchronous = _FULL

    def execute(self, sql: str, *parameters: Any) -> sqlite3.Cursor:
        if sql.startswith("PRAGMA"):
            found = super().execute(sql, *parameters)
            self.synchronous = super().execute("PRAGMA synchronous").fetchone()[0]
            return found
        self._disk.fail_sql(sql.split(None, 1)[0])
        return super().execute(sql, *parameters)

    def commit(self) -> None:
        disk = self._disk
        disk.fail_sql("commit")
        if _is_thread():
            disk.committing = self
            disk.on_commit()
            sleep(uniform(*_SYNC_S))
            disk.committing = None
        before = disk.files_of_database() if self.synchronous < _FULL else {}
        self.commit_now()
        disk.committed(self, before)

    def commit_now(self) -> None:
        super().commit()


def _is_thread() -> bool:
    return hasattr(greenlet.getcurrent(), "thread")


def _left_of(synced: bytes, now: bytes, keeps: Callable[[], bool]) -> bytes:
    """Return what a power cut leaves of a file's content."""
    if now == synced:
        return now
    if not keeps():
        return synced
    return _torn(synced, now) if flip(0.5) else now


def _torn(before: bytes, after: bytes) -> bytes:
    """Return a mixture: the first of the changed bytes, and then what was there before or zeros."""
    same = 0
    while same < len(after) and before[same : same + _BLOCK] == after[same : same + _BLOCK]:
        same += _BLOCK
    cut = randint(min(same, len(after)), len(after))
    if flip(0.3):
        return after[:cut] + bytes(len(after) - cut)
    return after[:cut] + before[cut:]


def stored_events(disk: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the events of each stream that the database on this disk has, as clients see them."""
    scratch = disk.with_name(f"{disk.name}-read")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    for suffix in ("", "-wal"):
        if (file := disk / f"{NAME}{suffix}").exists():
            shutil.copy(file, scratch)
    logs: dict[str, list[dict[str, Any]]] = {}
    with contextlib.closing(_connect(scratch / NAME)) as database:
        try:
            found = database.execute(_BATCHES).fetchall()
        except sqlite3.OperationalError:
            found = []
    for stream_id, data in found:
        events = msgspec.json.encode(msgspec.msgpack.decode(data, type=list[AnyEvent]))
        logs.setdefault(stream_id, []).extend(json.loads(events))
    return logs


def _disk_of(path: object) -> Disk | None:
    return next((disk for disk in _disks if disk.holds(path)), None)


def _path_of(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")


def _fsync(real: Callable[[int], None], descriptor: int) -> None:
    path = _path_of(descriptor)
    if (disk := _disk_of(f"{path}/")) is None:
        real(descriptor)
        return
    disk.fail("fsync")
    disk.synced(descriptor, path)


def _pwrite(real: Callable[..., int], descriptor: int, data: Any, at: int) -> int:
    disk = _disk_of(_path_of(descriptor))
    if disk is not None and len(data) > 1 and disk.trouble == "full" and flip(0.5):
        return real(descriptor, data[: len(data) // 2], at)
    if disk is not None:
        disk.fail("write")
    return real(descriptor, data, at)


def _by_descriptor(name: str, real: Callable[..., Any], descriptor: int, *rest: Any) -> Any:
    if (disk := _disk_of(_path_of(descriptor))) is not None:
        disk.fail(name)
    return real(descriptor, *rest)


def _by_path(name: str, real: Callable[..., Any], path: Any, *rest: Any, **options: Any) -> Any:
    is_read = name == "open" and not (rest and rest[0] & os.O_CREAT)
    if not is_read and (disk := _disk_of(path)) is not None:
        disk.fail(name)
    return real(path, *rest, **options)


def _connect_simulated(path: Any, **options: Any) -> sqlite3.Connection:
    if (disk := _disk_of(path)) is None:
        real: sqlite3.Connection = _connect(path, **options)
        return real
    connection = _connect(path, factory=SimConnection, **options)
    assert isinstance(connection, SimConnection)
    connection.use(disk)
    return connection


@contextlib.contextmanager
def patched() -> Iterator[None]:
    """Replace the functions of `os` and `sqlite3` that write to disks."""
    replaced: dict[str, Any] = {
        "fsync": partial(_fsync, os.fsync),
        "pwrite": partial(_pwrite, os.pwrite),
        "ftruncate": partial(_by_descriptor, "truncate", os.ftruncate),
        **{name: partial(_by_path, name, getattr(os, name)) for name in ("open", "replace")},
        "unlink": partial(_by_path, "unlink", os.unlink),
    }
    before = {name: getattr(os, name) for name in replaced}
    for name, function in replaced.items():
        setattr(os, name, function)
    sqlite3.connect = _connect_simulated  # type: ignore[assignment]
    try:
        yield
    finally:
        sqlite3.connect = _connect
        for name, function in before.items():
            setattr(os, name, function)


async def disk_fails(world: "World") -> None:
    """Let the disk fill up, break or stall for a while, a few times."""
    disk = world.machine.storage
    try:
        for _ in range(choice((0, 0, 1, 3))):
            await asyncio.sleep(uniform(0.0, 30.0))
            disk.trouble = choice(("full", "broken", "stalled"))
            world.tell(f"the disk is {disk.trouble}")
            world.faults.note(f"disk: {disk.trouble}")
            await asyncio.sleep(choice((uniform(0.1, 2.0), uniform(2.0, 40.0))))
            disk.trouble = ""
            world.tell("the disk works")
    finally:
        disk.trouble = ""
