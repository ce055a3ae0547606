"""A lock for engines that share one machine's cores. Only one engine at a time runs a step.

Two files in memory carry the locks. The engine that computes holds `turn`. The engine that has
waited longest holds `next`. So an engine that has just computed queues behind the waiting
engines. The system frees the locks of a process that dies. Each engine also publishes how much
time its running streams need. The other engines then limit their own steps.
"""

import contextlib
import fcntl
import logging
import mmap
import os
import struct
import time
from collections.abc import Iterator

from headrace_common.plan import Elsewhere
from headrace_common.system.memory_file import can_open_anew, open_memory_file

logger = logging.getLogger(__name__)

_NEED = struct.Struct("=ddq")  # monotonic time of the entry, seconds needed per step, flags
_MAX_ENGINES = 64
# The byte at this offset says whether there ever was a second engine.
_SHARED_AT = _NEED.size * _MAX_ENGINES
# The longest wait for the lock. A holder that hangs is left to its supervisor.
_PATIENCE_S = 5.0
_POLL_S = 0.0005
_FRESH_S = 1.0
_STREAMS, _PROMPTS = 1, 2


def open_core_lock() -> tuple[int, ...]:
    """Return the lock's file descriptors for child engines.

    Returns an empty tuple if the system does not support the lock. Without a lock, the engines
    share the cores as the system schedules them.
    """
    if not can_open_anew():
        logger.warning("Engines cannot take turns on this system, so they slow each other down.")
        return ()
    turn, following = (open_memory_file(name) for name in ("turn", "next"))
    os.ftruncate(turn, _SHARED_AT + 1)
    return turn, following


class CoreLock:
    """One engine's side of the lock. `number` distinguishes the engines."""

    def __init__(self, fds: tuple[int, ...], number: int) -> None:
        # Open the files again. Locks belong to an open file, and a child process inherits its
        # parent's open files.
        self._turn, self._next = (os.open(f"/proc/self/fd/{fd}", os.O_RDWR) for fd in fds)
        self._map = mmap.mmap(self._turn, _SHARED_AT + 1)
        self._number = number % _MAX_ENGINES
        if number > 0:
            self._map[_SHARED_AT] = 1

    @property
    def is_shared(self) -> bool:
        """Whether there may be a second engine. A single engine never waits."""
        return self._map[_SHARED_AT] != 0

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Wait for this engine's turn, and keep the turn during the context."""
        deadline = time.monotonic() + _PATIENCE_S
        is_next = _lock(self._next, deadline)
        has_turn = is_next and _lock(self._turn, deadline)
        if is_next:
            fcntl.flock(self._next, fcntl.LOCK_UN)
        try:
            yield
        finally:
            if has_turn:
                fcntl.flock(self._turn, fcntl.LOCK_UN)

    def note(self, decode_s: float, has_streams: bool, has_prompts: bool) -> None:
        """Publish this engine's current needs for the other engines."""
        kind = _STREAMS * has_streams + _PROMPTS * has_prompts
        need = _NEED.pack(time.monotonic(), decode_s, kind)
        self._map[self._number * _NEED.size : (self._number + 1) * _NEED.size] = need

    def others(self) -> Elsewhere:
        """Return how much time the other engines need, and whether they have streams or prompts."""
        now, found = time.monotonic(), Elsewhere()
        for number, (noted, decode_s, kind) in enumerate(_NEED.iter_unpack(self._map[:_SHARED_AT])):
            if number == self._number or not kind or now - noted > _FRESH_S + decode_s:
                continue
            found = Elsewhere(
                found.decode_s + (decode_s if kind & _STREAMS else 0.0),
                found.is_awaited or bool(kind & _STREAMS),
                found.num_with_prompts + bool(kind & _PROMPTS),
            )
        return found


def _lock(fd: int, deadline: float) -> bool:
    """Lock a file. Returns False if the holder does not release the lock in time."""
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        else:
            return True
