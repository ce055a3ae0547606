"""Weights that do not fit memory, in a file without a name that goes with the process.

It is mapped: the system keeps in memory as much of it as it can, drops what it needs for others
without writing, and reads again what is asked for. So nothing of it is ever swapped.
"""

import mmap
import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from headrace_common.errors import ModelError

_ALIGNED = 64  # bytes: a line of the cache
_SYNC_BYTES = 256 << 20  # written at once; what waits to be written is memory that nobody can take
_IN_MEMORY = ("tmpfs", "ramfs")


def room_for(layer_bytes: int) -> int:
    """Bytes of the file that a packed layer takes: weight, scale and bias, each from a line on."""
    return layer_bytes + 3 * _ALIGNED


def folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headrace" / "mapped"


def objection(size: int) -> str | None:
    """The reason why there can be no such file, as a sentence; None if there can."""
    own = folder()
    existing = next(path for path in (own, *own.parents) if path.exists())
    if _kind(existing) in _IN_MEMORY:
        return f"{existing} lies in memory, not on a disk."
    facts = os.statvfs(existing)
    free = facts.f_bavail * facts.f_frsize
    if free < size:
        return f"{existing} has {free >> 20} MiB free for {size >> 20} MiB of experts."
    return None


def _kind(path: Path) -> str:
    """The type of the file system that a path is on; empty where the system does not say."""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    found = {}
    for line in lines:
        before, _, after = line.partition(" - ")
        found[Path(before.split()[4])] = after.split()[0]
    real = path.resolve()
    return next((found[own] for own in (real, *real.parents) if own in found), "")


class MappedFile:
    def __init__(self, size: int) -> None:
        own = folder()
        try:
            own.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=own) as file:
                os.posix_fallocate(file.fileno(), 0, size)
                self._map = mmap.mmap(file.fileno(), size)
                # else a miss reads all around it, which may be much more than one expert
                self._map.madvise(mmap.MADV_SEQUENTIAL)
        except OSError as error:
            raise ModelError(
                f"{own} cannot hold {size >> 20} MiB of experts ({error.strerror}); free some of "
                "its disk, set XDG_CACHE_HOME to another, or use a smaller model or --quantize.",
                "model_too_large",
            ) from error
        self._end = self._synced = 0
        self.num_bytes = 0  # that lie in it

    def place(self, tensor: Tensor) -> Tensor:
        """The same numbers, in the file."""
        raw = tensor.contiguous().view(torch.uint8).flatten().numpy()
        first = -(-self._end // _ALIGNED) * _ALIGNED
        self._end = first + raw.nbytes
        self.num_bytes += raw.nbytes
        self._map[first : self._end] = raw.tobytes()
        if self._end - self._synced >= _SYNC_BYTES:
            self._map.flush(self._synced, _SYNC_BYTES)
            self._synced += _SYNC_BYTES
        found = torch.frombuffer(self._map, dtype=torch.uint8, count=raw.nbytes, offset=first)
        return found.view(tensor.dtype).view(tensor.shape)
