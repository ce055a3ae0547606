"""Keeps weights that do not fit into memory in an unnamed file that vanishes with the process.

The file is mapped, and the system caches as much of the file as fits into memory. When memory is
short, the system drops pages, and reads a dropped page again when the page is used. Pages are
dropped without being written, so nothing is ever swapped.
"""

import mmap
import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from headrace_common.errors import ModelError
from headrace_common.system.file_systems import IN_MEMORY, cache_folder, kind_of, nearest_existing

# The alignment of tensors in bytes: the size of a cache line.
_ALIGNED = 64
# Data is flushed in parts of this many bytes, because the memory of unwritten pages cannot be
# reclaimed.
_SYNC_BYTES = 256 << 20


def aligned_bytes(layer_bytes: int) -> int:
    """Return the bytes that a packed layer's aligned weight, scale and bias take in the file."""
    return layer_bytes + 3 * _ALIGNED


def folder() -> Path:
    return cache_folder("mapped")


def objection(size: int) -> str | None:
    """Return a sentence that says why a file of this size cannot be created, or None."""
    location = folder()
    existing = nearest_existing(location)
    if kind_of(existing) in IN_MEMORY:
        return f"{existing} is in memory, not on a disk."
    facts = os.statvfs(existing)
    free = facts.f_bavail * facts.f_frsize
    if free < size:
        return f"{existing} has only {free >> 20} MiB free for {size >> 20} MiB of experts."
    return None


class MappedFile:
    def __init__(self, size: int) -> None:
        location = folder()
        try:
            location.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=location) as file:
                os.posix_fallocate(file.fileno(), 0, size)
                self._map = mmap.mmap(file.fileno(), size)
                # By default, a page fault also reads the surrounding pages, which can be much more
                # than one expert.
                self._map.madvise(mmap.MADV_SEQUENTIAL)
        except OSError as error:
            raise ModelError(
                f"{location} cannot hold {size >> 20} MiB of experts ({error.strerror}). Free "
                "space on that disk, set XDG_CACHE_HOME to a folder on another disk, or use a "
                "smaller model or --quantize.",
                "model_too_large",
            ) from error
        self._end = self._synced = 0
        # The bytes of tensors in the file, without padding.
        self.num_bytes = 0

    def store(self, tensor: Tensor) -> Tensor:
        """Copy a tensor into the file; return a tensor that uses the memory of the copy."""
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
