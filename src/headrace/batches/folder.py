"""Batches in a folder that one server has to itself: a file a record, a file a blob."""

import asyncio
import contextlib
import functools
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from headrace.batches.records import BATCH, FILE, OPEN, STOP
from headrace.batches.shelf import NOBODY, Shelf
from headrace.streams.store import StoreStalled
from headrace_common.system.race import uncut
from headrace_common.system.state_files import MARK, drop_partial, make_folder, make_way, read_kept

T = TypeVar("T")

_MAX_RECORD_BYTES = 64 << 20
_TAIL = 1 << 16
_PATIENCE_S = 5.0  # a disk may never answer


def folder_shelf(path: Path) -> Shelf:
    """The shelf in this folder; blobs that no record names are what a kill left, and go."""
    threads = ThreadPoolExecutor(2, "batches")
    make_folder(path)
    records = FolderRecords(path / "records", threads)
    blobs = FolderBlobs(path / "blobs", threads)
    blobs.keep_only(records.ids(FILE) | records.unreadable)
    return Shelf(records, blobs)


def temporary_shelf() -> Shelf:
    """A shelf that goes with the process."""
    return folder_shelf(Path(_temporary().name))


@functools.cache
def _temporary() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="headrace-batches-")


class _InThread:
    """Work on files, off the event loop; an error of the disk is one of the store."""

    def __init__(self, folder: Path, threads: ThreadPoolExecutor) -> None:
        make_folder(folder)
        self._folder = folder
        self._threads = threads

    async def _do(self, work: Callable[[], T]) -> T:
        """Its result; cancelled, it ends after the work, which no other thread may overtake."""
        doing = asyncio.get_running_loop().run_in_executor(self._threads, work)
        try:
            return await uncut(doing, _PATIENCE_S)
        except OSError as error:
            why = (error.strerror or "it failed").lower()
            message = f"The server cannot store files now ({why}); try again later."
            raise StoreStalled(message) from error


class FolderRecords(_InThread):
    """Records are few, so they are all in memory, too."""

    def __init__(self, folder: Path, threads: ThreadPoolExecutor) -> None:
        super().__init__(folder, threads)
        self._known: dict[str, dict[str, bytes]] = {}
        self.unreadable: set[str] = set()  # ids of records that were moved aside, now or before
        for kind in (FILE, BATCH, OPEN, STOP):
            make_folder(folder / kind)
            self._known[kind] = {}
            for path in list((folder / kind).iterdir()):
                self._take_up(kind, path)

    def _take_up(self, kind: str, path: Path) -> None:
        """Read a record; delete what an interrupted write left; move an unreadable record aside."""
        if path.name.startswith("."):
            drop_partial(path)
            return
        id, mark, _ = path.name.partition(MARK)
        record = None if mark else read_kept(path, bytes, _MAX_RECORD_BYTES)
        if record is None:
            self.unreadable.add(id)
        else:
            self._known[kind][id] = record

    def ids(self, kind: str) -> set[str]:
        return set(self._known[kind])

    async def put(self, kind: str, id: str, record: bytes, holder: str = NOBODY) -> None:
        await self._do(lambda: _replace(self._folder / kind / id, record))
        self._known[kind][id] = record

    async def get(self, kind: str, id: str) -> bytes | None:
        return self._known[kind].get(id)

    async def all(self, kind: str) -> list[bytes]:
        return list(self._known[kind].values())

    async def remove(self, kind: str, id: str) -> None:
        if self._known[kind].pop(id, None) is not None:
            await self._do(lambda: (self._folder / kind / id).unlink(missing_ok=True))

    async def claim(self, id: str, is_held: bool = False) -> bool:
        return True


class FolderBlobs(_InThread):
    def __init__(self, folder: Path, threads: ThreadPoolExecutor) -> None:
        super().__init__(folder, threads)
        self._whole: set[str] = set()  # known to end in a whole line

    def keep_only(self, ids: set[str]) -> None:
        for path in list(self._folder.iterdir()):
            if MARK in path.name:
                continue
            make_way(path)
            if path.name not in ids:
                path.unlink(missing_ok=True)

    async def append(self, id: str, data: bytes, holder: str = NOBODY) -> None:
        is_whole = id in self._whole
        await self._do(lambda: _append(self._folder / id, data, is_whole))
        self._whole.add(id)

    async def read(self, id: str, start: int, most: int) -> bytes:
        return await self._do(lambda: _read(self._folder / id, start, most))

    async def remove(self, id: str) -> None:
        self._whole.discard(id)
        await self._do(lambda: (self._folder / id).unlink(missing_ok=True))


def _replace(path: Path, data: bytes) -> None:
    fresh = path.with_name(f".{path.name}")
    try:
        _append(fresh, data, is_whole=True, is_new=True)
        os.replace(fresh, path)
    except OSError:
        drop_partial(fresh)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _append(path: Path, data: bytes, is_whole: bool, is_new: bool = False) -> None:
    """Adds all of it or nothing; part of a line, which a kill left there, goes first."""
    flags = os.O_RDWR | os.O_CREAT | (os.O_TRUNC if is_new else 0)
    descriptor = os.open(path, flags, 0o600)
    try:
        size = os.fstat(descriptor).st_size
        if not is_whole:
            size = _whole_lines(descriptor, size)
            os.ftruncate(descriptor, size)
        try:
            left, at = memoryview(data), size
            while left:
                num = os.pwrite(descriptor, left, at)
                left, at = left[num:], at + num
            os.fsync(descriptor)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)


def _whole_lines(descriptor: int, size: int) -> int:
    """The size without what follows the last line break."""
    end = size
    while end > 0:
        start = max(0, end - _TAIL)
        if (at := os.pread(descriptor, end - start, start).rfind(b"\n")) >= 0:
            return start + at + 1
        end = start
    return 0


def _read(path: Path, start: int, most: int) -> bytes:
    try:
        with path.open("rb") as file:
            return os.pread(file.fileno(), most, start)
    except FileNotFoundError:
        return b""
