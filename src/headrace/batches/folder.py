"""Stores batches in a folder that only one server uses, with one file per record or blob."""

import asyncio
import contextlib
import functools
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from headrace.batches.records import BATCH, FILE, OPEN, STOP
from headrace.batches.store import NO_SIZES, NOBODY, BatchStore
from headrace.streams.store import StoreStalled
from headrace_common.system.race import uncut
from headrace_common.system.state_files import (
    MARK,
    drop_partial,
    make_folder,
    make_way,
    read_kept,
    sync_folder,
)

T = TypeVar("T")

_MAX_RECORD_BYTES = 64 << 20
_TAIL = 1 << 16
# The time for which a cancelled call waits for its thread, because a disk may never answer.
_PATIENCE_S = 5.0


def folder_batch_store(path: Path) -> BatchStore:
    """Open the batch store in this folder.

    Blobs without a record are leftovers of a killed server and are deleted.
    """
    threads = ThreadPoolExecutor(2, "batches")
    make_folder(path)
    records = FolderRecords(path / "records", threads)
    blobs = FolderBlobs(path / "blobs", threads)
    blobs.keep_only(records.ids(FILE) | records.unreadable)
    return BatchStore(records, blobs)


def temporary_batch_store() -> BatchStore:
    """Open a batch store that is deleted when the process ends."""
    return folder_batch_store(Path(_temporary().name))


@functools.cache
def _temporary() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="headrace-batches-")


class _InThread:
    """Runs file operations in threads; a disk error becomes StoreStalled."""

    def __init__(self, folder: Path, threads: ThreadPoolExecutor) -> None:
        make_folder(folder)
        self._folder = folder
        self._threads = threads

    async def _do(self, work: Callable[[], T]) -> T:
        """Run `work` in a thread and return its result.

        A cancelled call still waits for the thread, so that no later operation can overtake `work`.
        """
        doing = asyncio.get_running_loop().run_in_executor(self._threads, work)
        try:
            return await uncut(doing, _PATIENCE_S)
        except OSError as error:
            why = (error.strerror or "it failed").lower()
            message = f"The server cannot store files now ({why}); try again later."
            raise StoreStalled(message) from error


class FolderRecords(_InThread):
    """Keeps one file per record. Records are few, so all records are also in memory."""

    def __init__(self, folder: Path, threads: ThreadPoolExecutor) -> None:
        super().__init__(folder, threads)
        self._known: dict[str, dict[str, bytes]] = {}
        # Ids of records whose files were unreadable and moved aside, in this run or an earlier one.
        self.unreadable: set[str] = set()
        for kind in (FILE, BATCH, OPEN, STOP):
            make_folder(folder / kind)
            self._known[kind] = {}
            for path in list((folder / kind).iterdir()):
                self._take_up(kind, path)

    def _take_up(self, kind: str, path: Path) -> None:
        """Read a record file. Delete a partial file and move an unreadable file aside."""
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

    async def put(
        self,
        kind: str,
        id: str,
        record: bytes,
        holder: str = NOBODY,
        sizes: Mapping[str, int] = NO_SIZES,
    ) -> None:
        def write() -> None:
            _replace(self._folder / kind / id, record)
            # In the thread, so that a caller that is cancelled meanwhile leaves both or none.
            self._known[kind][id] = record

        await self._do(write)

    async def get(self, kind: str, id: str) -> bytes | None:
        return self._known[kind].get(id)

    async def now(self) -> int:
        return int(time.time())

    async def all(self, kind: str) -> list[bytes]:
        return list(self._known[kind].values())

    async def remove(self, kind: str, id: str) -> None:
        if id in self._known[kind]:

            def remove() -> None:
                _remove(self._folder / kind / id)
                self._known[kind].pop(id, None)

            await self._do(remove)

    async def claim(self, id: str, is_held: bool = False) -> bool:
        return True


class FolderBlobs(_InThread):
    def __init__(self, folder: Path, threads: ThreadPoolExecutor) -> None:
        super().__init__(folder, threads)
        # The number of durable bytes of each blob. A failed append may have left more in its file.
        self._sizes: dict[str, int] = {}

    def keep_only(self, ids: set[str]) -> None:
        for path in list(self._folder.iterdir()):
            if MARK in path.name:
                continue
            make_way(path)
            if path.name not in ids:
                path.unlink(missing_ok=True)

    async def append(self, id: str, data: bytes, holder: str = NOBODY) -> None:
        path = self._folder / id
        # After a cancelled append, it is not known whether the lines are stored.
        size = self._sizes.pop(id, None)
        if size is None:
            size = await self._do(lambda: _prepare(path))
        try:
            await self._do(lambda: _write(path, size, data))
        except StoreStalled:
            self._sizes[id] = size
            raise
        self._sizes[id] = size + len(data)

    async def read(self, id: str, start: int, most: int) -> bytes:
        return await self._do(lambda: _read(self._folder / id, start, most))

    async def remove(self, id: str) -> None:
        self._sizes.pop(id, None)
        await self._do(lambda: _remove(self._folder / id))


def _replace(path: Path, data: bytes) -> None:
    fresh, is_new = path.with_name(f".{path.name}"), not path.exists()
    try:
        _write(fresh, 0, data)
        os.replace(fresh, path)
    except OSError:
        drop_partial(fresh)
        raise
    try:
        sync_folder(path.parent)
    except OSError:
        # The caller reports that nothing is stored, so the next server must not find the record.
        if is_new:
            drop_partial(path)
        raise


def _remove(path: Path) -> None:
    path.unlink(missing_ok=True)
    # Otherwise the file may come back after a power failure.
    sync_folder(path.parent)


def _prepare(path: Path) -> int:
    """Create the file if it is missing, sync its folder, and return the size of its whole lines.

    A killed server may have left an incomplete last line.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        sync_folder(path.parent)
        return _whole_lines(descriptor, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)


def _write(path: Path, at: int, data: bytes) -> None:
    """Replace all bytes after the first `at` bytes with `data`, or with nothing if this fails."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        end = at = min(at, os.fstat(descriptor).st_size)
        os.ftruncate(descriptor, at)
        try:
            left = memoryview(data)
            while left:
                num = os.pwrite(descriptor, left, end)
                left, end = left[num:], end + num
            os.fsync(descriptor)
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, at)
            raise
    finally:
        os.close(descriptor)


def _whole_lines(descriptor: int, size: int) -> int:
    """Return the size up to and including the last line break."""
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
