"""Limits the memory for the inputs of all requests, from their reading to their end."""

from collections import Counter
from typing import Self

from headrace_common.errors import RequestError
from headrace_common.system.memory_limits import installed_bytes

# Inputs of up to this number of bytes are neither counted nor refused, because the number of
# requests already limits their memory. So large inputs of one client never block small inputs.
_SMALL = 64 << 10
# The default limit, as a share of the machine's memory.
_SHARE = 8
_RETRY_S = 5.0


class InputMemory:
    """Counts the inputs that requests hold: texts, images, and images prepared for the engine.

    All requests together may hold `most` bytes, and the requests of one key half of that. A
    request without competitors always fits, so that no input is refused forever.
    """

    def __init__(self, most: int | None = None) -> None:
        """Set the limit; None stands for an eighth of the machine's memory."""
        self._most = installed_bytes() // _SHARE if most is None else most
        self._by_owner = Counter[str]()

    @property
    def num_bytes(self) -> int:
        return self._by_owner.total()

    def hold(self, owner: str, num_bytes: int) -> "HeldInput":
        """Count an input. Raises RequestError if the input does not fit now."""
        held = HeldInput(self, owner)
        held.resize(num_bytes)
        return held

    def add(self, owner: str, num_bytes: int) -> "HeldInput":
        """Count the input of a request that was admitted earlier, even if it does not fit."""
        held = HeldInput(self, owner)
        held.change(num_bytes)
        return held

    def check(self, owner: str, others: int, others_of_owner: int, num_bytes: int) -> None:
        """Raise RequestError if `num_bytes` and the other inputs together exceed a limit."""
        if owner and others_of_owner and others_of_owner + num_bytes > self._most // 2:
            who, held, most = "requests of this key", others_of_owner, self._most // 2
        elif others and others + num_bytes > self._most:
            who, held, most = "requests", others, self._most
        else:
            return
        message = (
            f"The inputs of earlier {who} take {held:,} bytes of memory, this request needs "
            f"{num_bytes:,}, and the limit is {most:,} (--max-total-input-bytes); try again later."
        )
        error = RequestError("server_overloaded", message, retry_after_s=_RETRY_S)
        raise error.noting(limit=most)

    def count(self, owner: str, change: int) -> None:
        self._by_owner[owner] += change
        if not self._by_owner[owner]:
            del self._by_owner[owner]

    def held_by(self, owner: str) -> int:
        return self._by_owner[owner]


class HeldInput:
    """Counts the input of one request until `close`, or until the end of a `with` block."""

    def __init__(self, memory: InputMemory, owner: str) -> None:
        self.owner = owner
        self._memory = memory
        self._num_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def resize(self, num_bytes: int) -> None:
        """Set the size of the input. Raises RequestError if the input grows and does not fit."""
        if num_bytes > max(_SMALL, self._num_bytes):
            memory, own = self._memory, self._num_bytes
            others = memory.num_bytes - own
            memory.check(self.owner, others, memory.held_by(self.owner) - own, num_bytes)
        self.change(num_bytes)

    def change(self, num_bytes: int) -> None:
        """Set the size of the input without checking the limit."""
        counted = num_bytes if num_bytes > _SMALL else 0
        self._memory.count(self.owner, counted - self._num_bytes)
        self._num_bytes = counted

    def shrink(self, num_bytes: int) -> None:
        """Set the size of the input if the input becomes smaller."""
        self.change(min(num_bytes, self._num_bytes))

    def move(self) -> "HeldInput":
        """Return a new object that counts this input instead of this object."""
        moved = HeldInput(self._memory, self.owner)
        moved._num_bytes, self._num_bytes = self._num_bytes, 0
        return moved

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        self.change(0)
