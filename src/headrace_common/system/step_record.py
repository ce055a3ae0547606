"""A record of what an engine does. The engine's parent can read it after the engine's death.

The record has the sequences of the current step, the start of the step, and the expected duration.
Between two steps, it has the time at which the last step ended.
Both processes map the record's memory. So even a segmentation fault during a step does not lose the
record.
"""

import mmap
import os
import struct
import time
from collections.abc import Iterable

from headrace_common.ids import SequenceId
from headrace_common.system.memory_file import open_memory_file

_CAPACITY = 1 << 16  # sequences
# The number of sequences, or one of the two numbers below. It is written last, when the rest is
# complete.
_NUMBER = struct.Struct("=q")
_TIMES = struct.Struct("=dd")  # monotonic start of the step, predicted seconds
_IDS_AT = _NUMBER.size + _TIMES.size
_ID = struct.Struct("=q")
_WAITING, _BETWEEN_STEPS = 0, -1

# A shorter step never counts as hanging, and neither does a shorter time between two steps.
_SHORT_S = 120.0
_TIMES_PREDICTED = 10.0
_UNMEASURED_S = 600.0


class StepRecord:
    """One process writes the record, and another process, which inherits `fd`, reads the record."""

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
        """Record the start of a step with these sequences.

        A `predicted_s` of 0 means unknown; inf means no limit.
        """
        packed = b"".join(map(_ID.pack, sequence_ids))
        self._map[_IDS_AT : _IDS_AT + len(packed)] = packed
        self._map[_NUMBER.size : _IDS_AT] = _TIMES.pack(time.monotonic(), predicted_s)
        self._map[: _NUMBER.size] = _NUMBER.pack(len(packed) // _ID.size)

    def clear(self) -> None:
        """Record that the engine works, but that no step is running."""
        predicted_s = _SHORT_S / _TIMES_PREDICTED
        self._map[_NUMBER.size : _IDS_AT] = _TIMES.pack(time.monotonic(), predicted_s)
        self._map[: _NUMBER.size] = _NUMBER.pack(_BETWEEN_STEPS)

    def wait(self) -> None:
        """Record that the engine waits for messages or another engine, for as long as it takes."""
        self._map[: _NUMBER.size] = _NUMBER.pack(_WAITING)

    def read(self) -> tuple[SequenceId, ...]:
        """Return the sequences of the running step, or of the step during which the writer died."""
        (number,) = _NUMBER.unpack_from(self._map)
        packed = self._map[_IDS_AT : _IDS_AT + max(0, number) * _ID.size]
        return tuple(SequenceId(id) for (id,) in _ID.iter_unpack(packed))

    def is_overdue(self, now: float, awake_since: float) -> bool:
        """Whether the engine has worked for so long that it must hang. Both times are monotonic.

        The time before `awake_since` does not count, because the process may have been stopped.
        """
        (number,) = _NUMBER.unpack_from(self._map)
        since, predicted_s = _TIMES.unpack_from(self._map, _NUMBER.size)
        limit = max(_SHORT_S, _TIMES_PREDICTED * predicted_s) if predicted_s else _UNMEASURED_S
        return number != _WAITING and bool(now - max(since, awake_since) > limit)

    def close(self) -> None:
        self._map.close()
        os.close(self.fd)
