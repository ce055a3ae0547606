"""The folder of prefix runs that engines and servers of one machine share; no locks, no index.

Below it each model has a folder, named by a key over all that its numbers depend on. A file's name
says which blocks it holds; its time of change is when it was last used. A file appears whole, by a
rename, so that a kill leaves at most a `.part` that a later sweep removes.
"""

import contextlib
import hashlib
import itertools
import os
import time
from collections.abc import Iterable, Iterator
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import msgspec

from headrace_common.prefix import PrefixRun
from headrace_engine.prefixes import format

KEY_BYTES = 16
DAY_S = 86400.0
ABOUT = "model.json"
_PART = ".part"
_PART_AGE_S = 3600.0
_SPELL_S = 600.0  # files used within one leave deepest first: what is left is then a prefix
_ENTRIES_AT_ONCE, _REST_S = 64, 0.002  # of a listing, so that no step waits for it
_KEPT_FREE, _KEPT_FREE_SHARE = 1 << 30, 0.1  # of the disk, for the logs of streams

_counter = itertools.count()


class StoredRun(NamedTuple):
    """A file, by what its name says: the last block's name, and the blocks [first, end)."""

    name: bytes
    first: int
    end: int


class StoredFile(NamedTuple):
    """A file as a listing shows it."""

    path: str
    used_at: float
    num_bytes: int
    first: int  # block; -1: not of a whole run


class About(msgspec.Struct, frozen=True):
    """A model as far as its cached numbers depend on it; the key is made of this."""

    model: str
    fingerprint: str
    lane: str
    dtype: str
    kernels: str
    block_size: int
    cache: str  # its layers
    libraries: str  # whose products and attention these are
    version: int = format.VERSION

    @property
    def key(self) -> bytes:
        """16 bytes; the name by which it is served does not count."""
        packed = msgspec.msgpack.encode(msgspec.structs.replace(self, model=""))
        return hashlib.blake2b(packed, digest_size=KEY_BYTES).digest()


class PrefixFolder:
    """One model's part of the folder. OSError from any call means that the disk does not work."""

    def __init__(self, root: Path, about: About) -> None:
        self.key = about.key
        self.path = root / self.key.hex()
        self._about = about

    def open(self) -> None:
        """Makes the folder, for its user alone."""
        make_private(self.path.parent)
        self.path.mkdir(mode=0o700, exist_ok=True)
        if not (self.path / ABOUT).exists():
            self._put(ABOUT, [msgspec.json.encode(self._about)])

    def stored(self) -> list[StoredRun]:
        """The runs that are there."""
        return [found for name in os.listdir(self.path) if (found := parse(name)) is not None]

    def changed_at(self) -> float:
        """When a file came or left last."""
        return self.path.stat().st_mtime

    def write(self, run: PrefixRun, numbers: memoryview) -> None:
        self._put(file_name(run), format.parts(self.key, run, numbers))

    def read(self, run: PrefixRun, num_bytes: int) -> memoryview:
        """Read a run as `format.read` does; FileNotFoundError if it has left."""
        with FileIO(self.path / file_name(run)) as file:
            size = os.fstat(file.fileno()).st_size
            return format.read(file, size, format.head(self.key, run), num_bytes)

    def touch(self, run: PrefixRun) -> None:
        """Notes that it is in use; FileNotFoundError if it has left."""
        os.utime(self.path / file_name(run))

    def remove(self, run: PrefixRun) -> None:
        (self.path / file_name(run)).unlink(missing_ok=True)

    def has_room(self, num_bytes: int) -> bool:
        """Whether the disk holds that much more, and what streams' logs may need."""
        disk = os.statvfs(self.path)
        kept = min(_KEPT_FREE, int(_KEPT_FREE_SHARE * disk.f_blocks * disk.f_frsize))
        return disk.f_bavail * disk.f_frsize - num_bytes >= kept

    def _put(self, name: str, parts: Iterable[bytes | memoryview]) -> None:
        part = self.path / f"{os.getpid()}-{next(_counter)}{_PART}"
        try:
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "wb", buffering=0) as file:
                for data in parts:
                    _write_all(file.fileno(), data)
                # no more than one file waits to be written, before the logs of streams
                os.fsync(file.fileno())
            part.rename(self.path / name)
        except OSError:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise


def make_private(root: Path) -> None:
    """Makes the folder; one that holds other things keeps its mode."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    if all(_is_key(name) for name in os.listdir(root)):
        root.chmod(0o700)


def file_name(run: PrefixRun | StoredRun) -> str:
    return f"{run.name.hex()}-{run.first}-{run.end}"


def parse(file_name: str) -> StoredRun | None:
    """None for a name that is none of ours."""
    name, *numbers = file_name.split("-")
    try:
        first, end = (int(number) for number in numbers)
        return StoredRun(bytes.fromhex(name), first, end)
    except ValueError:
        return None


def _is_key(name: str) -> bool:
    return len(name) == 2 * KEY_BYTES and set(name) <= set("0123456789abcdef")


def _write_all(descriptor: int, data: bytes | memoryview) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def model_folders(root: Path) -> list[Path]:
    """The folders of models that were ever cached there."""
    with contextlib.suppress(FileNotFoundError):
        return sorted(root / name for name in os.listdir(root) if _is_key(name))
    return []


def files(folder: Path) -> Iterator[StoredFile]:
    """Every file of ours in a model's folder; rests now and then."""
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for number, entry in enumerate(entries, 1):
            found = parse(entry.name)
            if found is not None or entry.name.endswith(_PART):
                with contextlib.suppress(FileNotFoundError):
                    stat = entry.stat()
                    first = -1 if found is None else found.first
                    yield StoredFile(entry.path, stat.st_mtime, stat.st_size, first)
            if number % _ENTRIES_AT_ONCE == 0:
                time.sleep(_REST_S)


def leaving(
    found: Iterable[StoredFile], max_bytes: int, max_days: float, now: float
) -> list[StoredFile]:
    """The files that must go: too old ones, then those least recently used, deepest first."""
    gone: list[StoredFile] = []
    kept: list[StoredFile] = []
    for file in found:
        age = now - file.used_at
        is_over = age > _PART_AGE_S if file.first < 0 else age > max_days * DAY_S
        (gone if is_over else kept).append(file)
    kept.sort(key=lambda file: (file.used_at // _SPELL_S, -file.first))
    num_bytes = sum(file.num_bytes for file in kept)
    for file in kept:
        if num_bytes <= max_bytes:
            break
        if file.first >= 0:
            gone.append(file)
            num_bytes -= file.num_bytes
    return gone


def sweep(root: Path, max_bytes: int, max_days: float) -> int:
    """Removes what must go, whoever wrote it; returns the bytes that are left."""
    found = [file for folder in model_folders(root) for file in files(folder)]
    gone = leaving(found, max_bytes, max_days, time.time())
    for number, file in enumerate(gone, 1):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(file.path)
        if number % _ENTRIES_AT_ONCE == 0:
            time.sleep(_REST_S)
    return sum(file.num_bytes for file in found) - sum(file.num_bytes for file in gone)


def about(folder: Path) -> About | None:
    """The model of a folder; None if its description cannot be read."""
    try:
        return msgspec.json.decode((folder / ABOUT).read_bytes(), type=About)
    except (OSError, msgspec.DecodeError):
        return None


def clear(root: Path) -> tuple[int, int]:
    """Removes every file of ours, and folders that are then empty: files, and bytes."""
    num_files = num_bytes = 0
    for folder in model_folders(root):
        for file in list(files(folder)):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(file.path)
                num_files, num_bytes = num_files + 1, num_bytes + file.num_bytes
        with contextlib.suppress(OSError):
            (folder / ABOUT).unlink()
            folder.rmdir()
    return num_files, num_bytes
