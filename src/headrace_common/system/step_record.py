"""The record of the step at work, for the parent of an engine, readable however the engine ends.

It says which sequences are in the current step, when the step began and how long it should take.
Both processes map its memory, so even a fault signal in mid-step does not lose it.
"""

import mmap
import os
import struct
import time
from collections.abc import Iterable

from headrace_common.ids import SequenceId
from headrace_common.system.memory_file import open_memory_file

_CAPACITY = 1 << 16  # sequences
_NUMBER = struct.Struct("=q")  # of sequences; written last, when the rest is complete
_TIMES = struct.Struct("=dd")  # monotonic, when the step began, and the seconds predicted for it
_IDS_AT = _NUMBER.size + _TIMES.size
_ID = struct.Struct("=q")

_SHORT_S = 120.0  # a step that has run for less does not hang
_TIMES_PREDICTED = 10.0
_UNMEASURED_S = 600.0


class StepRecord:
    """Written by one process, read by another. `fd` is passed on to it."""

    def __init__(self, fd: int | None = None) -> None:
        size = _IDS_AT + _ID.size * _CAPACITY
        if fd is None:
            fd = open_memory_file("step")
            os.ftruncate(fd, size)
        self.fd = fd
        try:
            self._map = mmap.mmap(fd, size)
        except OSError:
            os.close(fd)
            raise

    def write(self, sequence_ids: Iterable[SequenceId], predicted_s: float) -> None:
        """A step with these sequences begins; `predicted_s` 0: unknown, inf: no limit."""
        packed = b"".join(map(_ID.pack, sequence_ids))
        self._map[_IDS_AT : _IDS_AT + len(packed)] = packed
        self._map[_NUMBER.size : _IDS_AT] = _TIMES.pack(time.monotonic(), predicted_s)
        self._map[: _NUMBER.size] = _NUMBER.pack(len(packed) // _ID.size)

    def clear(self) -> None:
        """No step is running."""
        self._map[: _NUMBER.size] = _NUMBER.pack(0)

    def read(self) -> tuple[SequenceId, ...]:
        """The sequences of the step that is running, or was running when the writer died."""
        (number,) = _NUMBER.unpack_from(self._map)
        packed = self._map[_IDS_AT : _IDS_AT + number * _ID.size]
        return tuple(SequenceId(id) for (id,) in _ID.iter_unpack(packed))

    def is_overdue(self, now: float, awake_since: float) -> bool:
        """Whether that step has run for so long that it must hang; both times are monotonic.

        Before `awake_since` it may have been stopped.
        """
        (number,) = _NUMBER.unpack_from(self._map)
        since, predicted_s = _TIMES.unpack_from(self._map, _NUMBER.size)
        limit = max(_SHORT_S, _TIMES_PREDICTED * predicted_s) if predicted_s else _UNMEASURED_S
        return bool(number) and bool(now - max(since, awake_since) > limit)

    def close(self) -> None:
        self._map.close()
        os.close(self.fd)
