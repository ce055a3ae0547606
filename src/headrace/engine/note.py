"""A note that the engine leaves where its parent can read it, however the engine ends.

It says which sequences are in the step at work and since when; in memory that both processes
map, so that not even a fault signal in mid-step loses it.
"""

import mmap
import os
import struct
import time
from collections.abc import Iterable

from headrace.core.ids import SequenceId

_CAPACITY = 1 << 16  # sequences
_HEAD = struct.Struct("=qd")  # their number, and the monotonic time when the step began
_ID = struct.Struct("=q")


class StepNote:
    """Written by one process, read by another. `fd` is passed on to it."""

    def __init__(self, fd: int | None = None) -> None:
        size = _HEAD.size + _ID.size * _CAPACITY
        if fd is None:
            fd = os.memfd_create("headrace-step")
            os.ftruncate(fd, size)
        self.fd = fd
        self._map = mmap.mmap(fd, size)

    def write(self, sequence_ids: Iterable[SequenceId]) -> None:
        """A step with these sequences begins."""
        packed = b"".join(map(_ID.pack, sequence_ids))
        self._map[_HEAD.size : _HEAD.size + len(packed)] = packed
        self._map[: _HEAD.size] = _HEAD.pack(len(packed) // _ID.size, time.monotonic())

    def clear(self) -> None:
        """No step is at work."""
        self._map[: _HEAD.size] = _HEAD.pack(0, 0.0)

    def read(self) -> tuple[SequenceId, ...]:
        """The sequences of the step that is at work, or was when the writer died."""
        number, _ = _HEAD.unpack(self._map[: _HEAD.size])
        packed = self._map[_HEAD.size : _HEAD.size + number * _ID.size]
        return tuple(SequenceId(id) for (id,) in _ID.iter_unpack(packed))

    def running_s(self) -> float:
        """Seconds since that step began; 0 if none is at work."""
        number, since = _HEAD.unpack(self._map[: _HEAD.size])
        return time.monotonic() - since if number else 0.0

    def close(self) -> None:
        self._map.close()
        os.close(self.fd)
