"""Jobs that wait for workers: keys take turns, and small bodies do not wait for large ones."""

import asyncio
import itertools
from bisect import insort
from collections.abc import Sequence
from contextvars import ContextVar

from headrace_common.errors import RequestError

OWNER: ContextVar[str] = ContextVar("owner", default="")
"""Whose client's work this task does, by its key; empty where there are no keys."""

LARGE = 64 << 10
"""Bytes of a body from which on it is large."""
MAX_LARGE_OF_KEY = 8
"""Large bodies of one key in line, beside the one that is in work."""

_TINY_BITS = 12  # jobs of up to 4 KiB are all alike
_MAX_WAITING = 1024  # jobs of one key, or of everybody where there are none

Body = Sequence[bytes | bytearray]
"""The pieces of a body, in order."""


class QueuedJob:
    """A packed job with its body; `done` is its packed result, or why there is none.

    Who cancels `done` has left.
    """

    __slots__ = ("body", "done", "head", "number", "owner", "size")

    _numbers = itertools.count()

    def __init__(self, head: bytes, body: Body) -> None:
        self.head = head
        self.body = list(body)
        self.number = next(self._numbers)
        self.owner = OWNER.get()
        self.size = sum(map(len, body))
        self.done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def __lt__(self, other: "QueuedJob") -> bool:
        """Whether this job goes first: smaller ones do; those of about a size keep their order."""
        mine, theirs = self.size.bit_length(), other.size.bit_length()
        return (max(mine, _TINY_BITS), self.number) < (max(theirs, _TINY_BITS), other.number)

    @property
    def is_large(self) -> bool:
        return self.size >= LARGE

    def refuse(self, error: RequestError) -> None:
        if not self.done.done():
            self.done.set_exception(error.with_traceback(None))  # shared: it would grow


class JobLine:
    """One line before `num_workers`, which call `next` and then `finish`.

    Of one owner at most one large job is in work, so that others find a worker for theirs. A key
    has at most all workers but one.
    """

    def __init__(self, num_workers: int) -> None:
        self._most_of_key = max(1, num_workers - 1)
        self._small: dict[str, list[QueuedJob]] = {}  # by owner, whose turn is next first
        self._large: dict[str, list[QueuedJob]] = {}
        self._in_work: set[QueuedJob] = set()
        self._has_changed = asyncio.Event()
        self._is_closed = False

    def __len__(self) -> int:
        """The number of jobs that wait."""
        return sum(map(len, (*self._small.values(), *self._large.values())))

    def put(self, job: QueuedJob) -> None:
        """RequestError if it cannot wait here."""
        if self._is_closed:
            raise SHUTDOWN.with_traceback(None)
        line = self._large if job.is_large else self._small
        num_waiting = len(line.get(job.owner, ()))
        if num_waiting >= _MAX_WAITING:
            raise _TOO_MANY.with_traceback(None)
        num_large = num_waiting + self._num_large_in_work(job.owner)
        if job.owner and job.is_large and num_large > MAX_LARGE_OF_KEY:
            raise _TOO_MANY_OF_KEY.with_traceback(None)
        insort(line.setdefault(job.owner, []), job)
        self._has_changed.set()

    def leave(self, job: QueuedJob) -> None:
        """Takes a job out of the line, if it is there."""
        line = self._large if job.is_large else self._small
        jobs = line.get(job.owner, [])
        if job in jobs:
            jobs.remove(job)
            if not jobs:
                del line[job.owner]

    async def next(self, takes_large: bool) -> QueuedJob:
        """The job whose turn it is, which is in work from now on. A large one goes first."""
        while (job := self._take(takes_large)) is None:
            self._has_changed.clear()
            await self._has_changed.wait()
        self._in_work.add(job)
        return job

    def finish(self, job: QueuedJob) -> None:
        """Notes that the job's worker can do another."""
        self._in_work.discard(job)
        job.refuse(SHUTDOWN)  # unless it is done
        job.body.clear()  # a refusal keeps the job in a cycle, but not the body
        self._has_changed.set()

    def close(self) -> None:
        """Refuses all that wait, and all that come."""
        self._is_closed = True
        for jobs in (*self._small.values(), *self._large.values()):
            for job in jobs:
                job.refuse(SHUTDOWN)
        self._small.clear()
        self._large.clear()

    def _take(self, takes_large: bool) -> QueuedJob | None:
        if takes_large:
            for owner in self._large:
                if not self._num_large_in_work(owner):
                    return _pop(self._large, owner)
        for owner in self._small:
            in_work = sum(job.owner == owner for job in self._in_work)
            if not owner or in_work < self._most_of_key:
                return _pop(self._small, owner)
        return None

    def _num_large_in_work(self, owner: str) -> int:
        return sum(job.owner == owner and job.is_large for job in self._in_work)


def _pop(line: dict[str, list[QueuedJob]], owner: str) -> QueuedJob:
    """Takes an owner's first job; then it is the turn of the others."""
    jobs = line.pop(owner)
    job = jobs.pop(0)
    if jobs:
        line[owner] = jobs
    return job


SHUTDOWN = RequestError("server_shutdown", "The server is shutting down.", retry_after_s=5)
_TOO_MANY = RequestError(
    "server_overloaded",
    f"{_MAX_WAITING} requests are waiting to be read, and that is the limit; try again later.",
    retry_after_s=5,
)
_TOO_MANY_OF_KEY = RequestError(
    "rate_limit_exceeded",
    f"{MAX_LARGE_OF_KEY} bodies of {LARGE >> 10} KiB or more that this key has sent wait to be "
    "read, and that is the limit; wait for their answers, or try again later.",
    retry_after_s=5,
).noting(limit=MAX_LARGE_OF_KEY)
