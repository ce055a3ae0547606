"""Stores segments in a folder that engines and servers of one machine share, without locks.

Each model has a subfolder, named by a hash of everything that the model's cached data depends on.
A file's name says which blocks the file holds. A file's modification time is the time of its last
use. A file is renamed into place once it is complete. So a killed process leaves at most a `.part`
file, which a later sweep removes.
"""

import contextlib
import hashlib
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import msgspec

from headrace_common.prefix import PrefixSegment
from headrace_engine.prefixes import format

KEY_BYTES = 16
DAY_S = 86400.0
ABOUT = "model.json"
_PART = ".part"
_PART_AGE_S = 3600.0
# Files whose last use was in the same period are removed in the order from last block to first.
# So the start of a prefix remains.
_PERIOD_S = 600.0
# A listing pauses for `_REST_S` seconds after this many entries, to avoid delaying a step.
_ENTRIES_AT_ONCE, _REST_S = 64, 0.002
# Disk space that stays free for the logs of streams: 1 GiB or a tenth of the disk, whichever is
# smaller.
_FREE_BYTES, _FREE_SHARE = 1 << 30, 0.1

_counter = itertools.count()


SizeLimit = Callable[[int, int], int]
"""Returns the bytes that a folder may take, from the disk's free bytes and the folder's bytes."""


class StoredSegment(NamedTuple):
    """Holds the parts of a file's name: the last block's name, and the blocks [first, end)."""

    name: bytes
    first: int
    end: int


class StoredFile(NamedTuple):
    """Describes a file in a directory listing."""

    path: str
    used_at: float
    num_bytes: int
    # The first block; -1 for an unfinished file.
    first: int


class About(msgspec.Struct, frozen=True):
    """Describes everything that a model's cached data depends on. `key` is a hash of the fields."""

    model: str
    fingerprint: str
    lane: str
    dtype: str
    kernels: str
    block_size: int
    # The cache layout of the model's layers, as JSON.
    cache: str
    # The libraries that compute the data, with their versions.
    libraries: str
    # Sizes and times of the files with weights. The fingerprint only covers samples of them, so a
    # model that was trained further can have the same fingerprint.
    weights: str = ""
    version: int = format.VERSION

    @property
    def key(self) -> bytes:
        """Return the 16 bytes of the key, which does not depend on the model's path."""
        packed = msgspec.msgpack.encode(msgspec.structs.replace(self, model=""))
        return hashlib.blake2b(packed, digest_size=KEY_BYTES).digest()


class PrefixFolder:
    """Reads and writes one model's subfolder. Every method raises OSError if the disk fails."""

    def __init__(self, root: Path, about: About) -> None:
        self.key = about.key
        self.path = root / self.key.hex()
        self._about = about

    def open(self) -> None:
        """Create the folder, readable only by its owner."""
        make_private(self.path.parent)
        self.path.mkdir(mode=0o700, exist_ok=True)
        if not (self.path / ABOUT).exists():
            self._put(ABOUT, [msgspec.json.encode(self._about)])

    def stored(self) -> list[StoredSegment]:
        """Return the segments in the folder."""
        return [found for name in os.listdir(self.path) if (found := parse(name)) is not None]

    def changed_at(self) -> float:
        """Return when a file was last added to or removed from the folder."""
        return self.path.stat().st_mtime

    def write(self, segment: PrefixSegment, numbers: memoryview) -> None:
        self._put(file_name(segment), format.parts(self.key, segment, numbers))

    def read(self, segment: PrefixSegment, num_bytes: int) -> memoryview:
        """Read a segment as `format.read` does; FileNotFoundError if the file was removed."""
        with FileIO(self.path / file_name(segment)) as file:
            size = os.fstat(file.fileno()).st_size
            return format.read(file, size, format.head(self.key, segment), num_bytes)

    def touch(self, segment: PrefixSegment) -> None:
        """Mark a segment as used now; FileNotFoundError if the file was removed."""
        os.utime(self.path / file_name(segment))

    def remove(self, segment: PrefixSegment) -> None:
        (self.path / file_name(segment)).unlink(missing_ok=True)

    def has_room(self, num_bytes: int) -> bool:
        """Return whether the disk has space for `num_bytes` and for the logs of streams."""
        disk = os.statvfs(self.path)
        kept = min(_FREE_BYTES, int(_FREE_SHARE * disk.f_blocks * disk.f_frsize))
        return disk.f_bavail * disk.f_frsize - num_bytes >= kept

    def _put(self, name: str, parts: Iterable[bytes | memoryview]) -> None:
        part = self.path / f"{os.getpid()}-{next(_counter)}{_PART}"
        try:
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "wb", buffering=0) as file:
                for data in parts:
                    _write_all(file.fileno(), data)
                # Sync each file separately. If a stream's log has to be synced meanwhile, at most
                # one file is still unwritten.
                os.fsync(file.fileno())
            part.rename(self.path / name)
        except OSError:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise


def make_private(root: Path) -> None:
    """Create the folder. Make the folder private unless it contains other files."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    if all(_is_key(name) for name in os.listdir(root)):
        root.chmod(0o700)


def make_own(root: Path) -> None:
    """Create the folder, readable only by its owner. Raise OSError if another user owns it."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    if root.stat().st_uid != os.getuid():
        raise PermissionError(f"{root} belongs to another user")
    root.chmod(0o700)


def file_name(segment: PrefixSegment | StoredSegment) -> str:
    return f"{segment.name.hex()}-{segment.first}-{segment.end}"


def parse(file_name: str) -> StoredSegment | None:
    """Return the segment that a file name describes, or None."""
    name, *numbers = file_name.split("-")
    try:
        first, end = (int(number) for number in numbers)
        return StoredSegment(bytes.fromhex(name), first, end)
    except ValueError:
        return None


def _is_key(name: str) -> bool:
    return len(name) == 2 * KEY_BYTES and set(name) <= set("0123456789abcdef")


def _write_all(descriptor: int, data: bytes | memoryview) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def model_folders(root: Path) -> list[Path]:
    """Return the folders of all models in `root`, including models that are no longer used."""
    with contextlib.suppress(FileNotFoundError):
        return sorted(root / name for name in os.listdir(root) if _is_key(name))
    return []


def files(folder: Path) -> Iterator[StoredFile]:
    """Yield the finished and unfinished files of a model's folder, with short pauses."""
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


def files_to_remove(
    found: Iterable[StoredFile], max_bytes: int, max_days: float, now: float
) -> list[StoredFile]:
    """Return the files to remove: first files that are too old, then the least recently used files.

    Files whose last use was in the same period are removed in the order from last block to first.
    """
    removed: list[StoredFile] = []
    kept: list[StoredFile] = []
    for file in found:
        age = now - file.used_at
        is_over = age > _PART_AGE_S if file.first < 0 else age > max_days * DAY_S
        (removed if is_over else kept).append(file)
    kept.sort(key=lambda file: (file.used_at // _PERIOD_S, -file.first))
    num_bytes = sum(file.num_bytes for file in kept)
    for file in kept:
        if num_bytes <= max_bytes:
            break
        if file.first >= 0:
            removed.append(file)
            num_bytes -= file.num_bytes
    return removed


def sweep(root: Path, limit: SizeLimit, max_days: float) -> int:
    """Remove files of any model until the limits are met; return how many bytes remain."""
    found = [file for folder in model_folders(root) for file in files(folder)]
    disk = os.statvfs(root)
    max_bytes = limit(disk.f_bavail * disk.f_frsize, sum(file.num_bytes for file in found))
    removed = files_to_remove(found, max_bytes, max_days, time.time())
    for number, file in enumerate(removed, 1):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(file.path)
        if number % _ENTRIES_AT_ONCE == 0:
            time.sleep(_REST_S)
    return sum(file.num_bytes for file in found) - sum(file.num_bytes for file in removed)


def about(folder: Path) -> About | None:
    """Return the description of a folder's model; None if it cannot be read."""
    try:
        return msgspec.json.decode((folder / ABOUT).read_bytes(), type=About)
    except (OSError, msgspec.DecodeError):
        return None


def clear(root: Path) -> tuple[int, int]:
    """Remove all segments, then the empty folders; return the number of removed files and bytes."""
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
