"""The lock of engines that share one machine's cores: each step is one engine's alone.

Two lock files in memory: who waits longest holds `next`, who computes holds `turn`. So the one that
just had its turn stands behind those that wait. The system frees the locks of a process that dies.
Beside them, each engine notes what its running streams need, so that the others leave them room.
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

_NEED = struct.Struct("=ddq")  # when it was noted, seconds, and the kind
_MAX_ENGINES = 64
_SHARED_AT = _NEED.size * _MAX_ENGINES  # a byte: whether there was ever a second engine
_PATIENCE_S = 5.0  # with a holder that hangs; its own supervisor deals with it
_POLL_S = 0.0005
_FRESH_S = 1.0
_STREAMS, _PROMPTS = 1, 2


def open_core_lock() -> tuple[int, ...]:
    """The files of the lock, for a parent to pass on to its engines; none where there can be none.

    Its engines then share the cores as the system deals them out.
    """
    if not can_open_anew():
        logger.warning("Engines do not take turns on this system: a step of one slows the others.")
        return ()
    turn, following = (open_memory_file(name) for name in ("turn", "next"))
    os.ftruncate(turn, _SHARED_AT + 1)
    return turn, following


class CoreLock:
    """One engine's part. `number` tells the engines apart."""

    def __init__(self, fds: tuple[int, ...], number: int) -> None:
        # opened anew: a lock belongs to an open file, and children share their parent's
        self._turn, self._next = (os.open(f"/proc/self/fd/{fd}", os.O_RDWR) for fd in fds)
        self._map = mmap.mmap(self._turn, _SHARED_AT + 1)
        self._number = number % _MAX_ENGINES
        if number > 0:
            self._map[_SHARED_AT] = 1

    @property
    def is_shared(self) -> bool:
        """Whether there may be another engine; alone, it need not wait for its turn."""
        return self._map[_SHARED_AT] != 0

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Waits for this engine's turn, and keeps it as long as the context lasts."""
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
        """Tells the others what this engine needs from now on."""
        kind = _STREAMS * has_streams + _PROMPTS * has_prompts
        need = _NEED.pack(time.monotonic(), decode_s, kind)
        self._map[self._number * _NEED.size : (self._number + 1) * _NEED.size] = need

    def others(self) -> Elsewhere:
        """The needs of the other engines at work."""
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
    """False if nobody lets go in time."""
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(_POLL_S)
        else:
            return True
