"""Queues jobs for workers: API keys take turns, and small bodies do not wait for large bodies."""

import asyncio
import itertools
from bisect import insort
from collections.abc import Sequence
from contextvars import ContextVar

from headrace_common.errors import RequestError
from headrace_common.system.memory_limits import installed_bytes

OWNER: ContextVar[str] = ContextVar("owner", default="")
"""The API key whose client this task serves; empty if the server has no keys."""

LARGE = 64 << 10
"""The minimum size of a large body, in bytes."""
MAX_LARGE_OF_KEY = 8
"""The maximum number of waiting large bodies per key, in addition to a running large body."""

# Jobs of up to 4 KiB count as equally small.
_TINY_BITS = 12
# The maximum number of waiting jobs per key, or of all jobs if the server has no keys.
_MAX_WAITING = 1024
# The maximum size of all waiting jobs, as a share of the machine's memory. A small request can
# cause a large job, for example if the request names a stored conversation.
_MAX_SHARE = 8

Body = Sequence[bytes | bytearray]
"""The pieces of a body, in order."""


class QueuedJob:
    """A packed job with its body. `done` gets the packed result or the error.

    If the client leaves, `done` is cancelled.
    """

    __slots__ = ("body", "done", "head", "is_large", "number", "owner", "size")

    _numbers = itertools.count()

    def __init__(self, head: bytes, body: Body) -> None:
        self.head = head
        self.body = list(body)
        self.number = next(self._numbers)
        self.owner = OWNER.get()
        self.size = sum(map(len, body))
        self.is_large = self.size >= LARGE
        self.done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    def __lt__(self, other: "QueuedJob") -> bool:
        """Return whether this job runs before `other`.

        Smaller jobs run first. Jobs of similar size keep their order.
        """
        mine, theirs = self.size.bit_length(), other.size.bit_length()
        return (max(mine, _TINY_BITS), self.number) < (max(theirs, _TINY_BITS), other.number)

    def refuse(self, error: RequestError) -> None:
        if not self.done.done():
            # The exception is shared. Its traceback would otherwise grow with each use.
            self.done.set_exception(error.with_traceback(None))


class JobQueue:
    """One queue for `num_workers` workers, which call `next` and then `finish`.

    At most one large job per owner runs at a time. Jobs of one key never use all workers, so that a
    worker remains for the jobs of other keys.
    """

    def __init__(self, num_workers: int, max_bytes: int | None = None) -> None:
        """Set the limits; if `max_bytes` is None, a share of the machine's memory is the limit."""
        self._max_bytes = max_bytes or installed_bytes() // _MAX_SHARE
        self._most_of_key = max(1, num_workers - 1)
        # Waiting jobs by owner. The owner whose turn is next comes first.
        self._small: dict[str, list[QueuedJob]] = {}
        self._large: dict[str, list[QueuedJob]] = {}
        self._running: set[QueuedJob] = set()
        self._has_changed = asyncio.Event()
        self._is_closed = False

    def __len__(self) -> int:
        """Return the number of waiting jobs."""
        return sum(map(len, (*self._small.values(), *self._large.values())))

    def put(self, job: QueuedJob) -> None:
        """Add a job. Raises RequestError if the queue is full or closed."""
        if self._is_closed:
            raise SHUTDOWN.with_traceback(None)
        waiting = self._large if job.is_large else self._small
        num_waiting = len(waiting.get(job.owner, ()))
        if num_waiting >= _MAX_WAITING:
            raise _TOO_MANY.with_traceback(None)
        num_bytes = self._num_bytes()
        if job.is_large and num_bytes and num_bytes + job.size > self._max_bytes:
            raise _TOO_LARGE.with_traceback(None)
        if job.owner and job.is_large:
            num_large = num_waiting + self._num_large_running(job.owner)
            if num_large > MAX_LARGE_OF_KEY:
                raise _TOO_MANY_OF_KEY.with_traceback(None)
        insort(waiting.setdefault(job.owner, []), job)
        self._has_changed.set()

    def leave(self, job: QueuedJob) -> None:
        """Remove a job from the queue if the job is still waiting."""
        waiting = self._large if job.is_large else self._small
        jobs = waiting.get(job.owner, [])
        if job in jobs:
            jobs.remove(job)
            if not jobs:
                del waiting[job.owner]

    async def next(self, takes_large: bool) -> QueuedJob:
        """Return the next job. From then on, the job counts as running.

        A worker that takes large jobs gets a large job first.
        """
        while (job := self._take(takes_large)) is None:
            self._has_changed.clear()
            await self._has_changed.wait()
        self._running.add(job)
        return job

    def finish(self, job: QueuedJob) -> None:
        """Record that the job's worker is free again."""
        self._running.discard(job)
        if not job.done.done():
            job.refuse(SHUTDOWN)
        # A refused job stays alive in a reference cycle, but its body is not needed any more.
        job.body.clear()
        if self._small or self._large:
            self._has_changed.set()

    def close(self) -> None:
        """Refuse all waiting jobs and all later jobs."""
        self._is_closed = True
        for jobs in (*self._small.values(), *self._large.values()):
            for job in jobs:
                job.refuse(SHUTDOWN)
        self._small.clear()
        self._large.clear()

    def _take(self, takes_large: bool) -> QueuedJob | None:
        if takes_large:
            for owner in self._large:
                if not self._num_large_running(owner):
                    return _pop(self._large, owner)
        for owner in self._small:
            if not owner or self._num_running(owner) < self._most_of_key:
                return _pop(self._small, owner)
        return None

    def _num_bytes(self) -> int:
        return sum(job.size for jobs in self._large.values() for job in jobs)

    def _num_running(self, owner: str) -> int:
        return sum(job.owner == owner for job in self._running)

    def _num_large_running(self, owner: str) -> int:
        return sum(job.owner == owner and job.is_large for job in self._running)


def _pop(waiting: dict[str, list[QueuedJob]], owner: str) -> QueuedJob:
    """Remove and return an owner's first job. The owner moves to the end of the order."""
    jobs = waiting.pop(owner)
    job = jobs.pop(0)
    if jobs:
        waiting[owner] = jobs
    return job


SHUTDOWN = RequestError("server_shutdown", "The server is shutting down.", retry_after_s=5)
_TOO_MANY = RequestError(
    "server_overloaded",
    f"{_MAX_WAITING} requests are waiting to be read, which is the limit; try again later.",
    retry_after_s=5,
)
_TOO_LARGE = RequestError(
    "server_overloaded",
    "The requests that wait to be read take too much memory; try again later.",
    retry_after_s=5,
)
_TOO_MANY_OF_KEY = RequestError(
    "rate_limit_exceeded",
    f"This key has {MAX_LARGE_OF_KEY} bodies of {LARGE >> 10} KiB or more waiting to be read, "
    "which is the limit; wait for their answers, or try again later.",
    retry_after_s=5,
).noting(limit=MAX_LARGE_OF_KEY)
