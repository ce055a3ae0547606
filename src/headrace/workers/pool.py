"""Runs work that grows with a client's input outside the event loop, where it can be killed.

A job (headrace_common/worker_jobs.py) is a pure function of its message and a body. Jobs run in
worker processes with limited memory and processor time. The simple implementation runs jobs in
threads.
"""

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

import msgspec

from headrace.workers.job_queue import OWNER, Body, JobQueue, QueuedJob
from headrace.workers.process import Reply, WorkerProcess
from headrace_common.errors import OVERRAN, RequestError
from headrace_common.system.panics import STEERING
from headrace_common.worker_jobs import (
    AnyJob,
    Job,
    Refusal,
    decode_job,
    decode_result,
    encode_job,
    encode_result,
)

logger = logging.getLogger(__name__)

R = TypeVar("R")

TEMPLATE_S = 5.0
"""The processor time for a chat template, in seconds. After that, a worker gets SIGPROF."""
JOB_S = 60.0
"""The processor time for a whole job, in seconds. After that, a worker gets SIGVTALRM."""
MEMORY_BYTES = 224 << 20
"""The bytes that a worker may allocate after loading."""

IMAGES = "images"
"""The option that starts the worker for images.

The image worker has a separate queue and the lowest priority.
"""
IMAGE_MEMORY_BYTES = 2 << 30

# The number of workers without the image worker. One of the workers takes only small jobs.
_NUM_WORKERS = 2
# The spare process starts this number of seconds after the server.
_FIRST_SPARE_S = 10.0
# After a client leaves, its job has this number of seconds to end before the worker is killed.
_GRACE_S = 0.1
# This time is longer for images, because restarting the image worker takes longer than most jobs.
_IMAGES_GRACE_S = 5.0
_TOO_MUCH = RequestError(
    "request_too_large",
    f"Reading and tokenizing this request takes more than {MEMORY_BYTES >> 20} MiB of memory or "
    f"{JOB_S:g} seconds of processor time; send less.",
)
_VERDICTS = {
    -signal.SIGPROF: RequestError(
        "template_failed",
        f"{OVERRAN}: it took more than {TEMPLATE_S:g} seconds of processor time; "
        "send fewer or shorter messages.",
        "messages",
    ),
    -signal.SIGVTALRM: _TOO_MUCH,
    # A native library ran out of memory.
    -signal.SIGABRT: _TOO_MUCH,
    -signal.SIGSEGV: _TOO_MUCH,
}
"""The error of a job whose worker died by one of these signals.

After any other death of a worker, its job is tried once more.
"""


Begin = Callable[[str, bytes, Sequence[str]], Awaitable[WorkerProcess]]
"""Starts a worker process from a module, its first message and its options."""


class JobRunner(Protocol):
    """Runs jobs of any size."""

    async def do(self, job: Job[R], body: Body = ()) -> R:
        """Return the job's result. Raises RequestError if it refuses `body` or exceeds a limit."""

    async def run(self) -> None:
        """Run the workers until cancelled."""


class Performer(Protocol):
    """The part of a worker that can do each kind of job."""

    def do(self, job: AnyJob, body: bytes) -> object:
        """Return the job's result. Raises RequestError if the job refuses `body`."""


def perform(jobs: Performer, head: bytes, body: bytes) -> bytes:
    """Return the packed result of the packed job `head`.

    Raises RequestError if the job refuses `body` or memory ran out.
    """
    try:
        return encode_result(jobs.do(decode_job(head), body))
    except MemoryError:
        raise _TOO_MUCH from None
    except (Exception, *STEERING):
        raise
    # A panic in a library must end only this job and not the job's worker or thread.
    except BaseException as panic:
        raise RuntimeError(f"a library failed ({type(panic).__name__})") from None


def _packed(job: Job[R]) -> bytes:
    return encode_job(msgspec.structs.replace(job, owner=OWNER.get()))


class ThreadJobRunner:
    """Runs jobs in threads of this process.

    Use it only if the caller limits the input, as the LLM class and tests do.
    """

    def __init__(self, jobs: Performer) -> None:
        self._jobs = jobs
        self._threads = ThreadPoolExecutor(_NUM_WORKERS, thread_name_prefix="work")

    async def do(self, job: Job[R], body: Body = ()) -> R:
        asked = (self._jobs, _packed(job), b"".join(body))
        running = asyncio.get_running_loop().run_in_executor(self._threads, perform, *asked)
        return decode_result(job, await running)

    async def run(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self._threads.shutdown(wait=False, cancel_futures=True)


class WorkerPool:
    """Runs jobs in worker processes (`python -m MODULE SOCKET`).

    Each process first receives `start`. With `has_keys`, an additional worker runs, so that the
    large bodies of two keys can be processed at the same time. `begin` starts a process.
    """

    def __init__(
        self,
        module: str,
        start: bytes,
        has_images: bool = False,
        has_keys: bool = False,
        begin: Begin = WorkerProcess.begin,
    ) -> None:
        num_workers = _NUM_WORKERS + has_keys
        # Set while `run` is running.
        self._tasks: asyncio.TaskGroup | None = None
        self._queue = JobQueue(num_workers)
        self._source = _ProcessSource(begin, module, start)
        self._workers = [
            _Worker(self._queue, self._source, takes_large=number > 0)
            for number in range(num_workers)
        ]
        self._module, self._begin = module, begin
        self._image_queue = JobQueue(1)
        self._images: _ProcessSource | None = (
            _ProcessSource(begin, module, start, IMAGES) if has_images else None
        )

    async def do(self, job: Job[R], body: Body = ()) -> R:
        queued = QueuedJob(_packed(job), body)
        queue = self._image_queue if job.is_for_images and self._images else self._queue
        queue.put(queued)
        try:
            return decode_result(job, await queued.done)
        except BaseException:
            queue.leave(queued)
            raise

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                for worker in self._workers:
                    tasks.create_task(worker.run(), name="worker")
                tasks.create_task(self._source.keep_spare(), name="spare worker")
                self._run_images()
        finally:
            self._queue.close()
            self._image_queue.close()

    def _run_images(self) -> None:
        if self._tasks is not None and self._images is not None:
            worker = _Worker(self._image_queue, self._images, grace_s=_IMAGES_GRACE_S)
            self._tasks.create_task(worker.run(), name="image worker")

    def renew(self, start: bytes, has_images: bool) -> None:
        """Make each worker start a new process with this `start` before the next job."""
        self._source.start = start
        if self._images is not None:
            self._images.start = start
        elif has_images:
            self._images = _ProcessSource(self._begin, self._module, start, IMAGES)
            self._run_images()


class _ProcessSource:
    """Starts worker processes, which get the message `start`.

    A spare process is kept ready, so that jobs need not wait for a start.
    """

    def __init__(self, begin: Begin, module: str, start: bytes, *options: str) -> None:
        self.start = start
        self._begin_process = begin
        self._module, self._options = module, options
        self._spare: WorkerProcess | None = None
        self._wants_spare = asyncio.Event()

    async def take(self, is_new: bool = False) -> WorkerProcess:
        """Return a process that is ready. Raises OSError if the system cannot start a process now.

        `is_new` starts a new process instead of using the spare process.
        """
        try:
            while self._spare is not None and not is_new:
                spare, self._spare = self._spare, None
                if spare.start == self.start and not spare.has_ended:
                    return spare
                await spare.end()
            return await self._begin()
        finally:
            self._wants_spare.set()

    async def keep_spare(self) -> None:
        """After the first call of `take`, keep a spare process ready."""
        try:
            # During the server's start, the engine and the first requests need the cores more.
            await asyncio.sleep(_FIRST_SPARE_S)
            while True:
                await self._wants_spare.wait()
                self._wants_spare.clear()
                if self._spare is None:
                    try:
                        self._spare = await self._begin()
                    except (OSError, EOFError) as error:
                        logger.warning("A spare worker process could not be started: %s", error)
        finally:
            if self._spare is not None:
                await self._spare.end()

    async def _begin(self) -> WorkerProcess:
        return await self._begin_process(self._module, self.start, self._options)


class _Worker:
    """Does the jobs of a queue, with one process at a time."""

    def __init__(
        self,
        queue: JobQueue,
        source: _ProcessSource,
        takes_large: bool = True,
        grace_s: float = _GRACE_S,
    ) -> None:
        self._queue, self._source = queue, source
        self._takes_large = takes_large
        self._grace_s = grace_s
        self._process: WorkerProcess | None = None

    async def run(self) -> None:
        try:
            await self._warm_up()
            while True:
                job = await self._queue.next(self._takes_large)
                try:
                    await self._do(job)
                    # The job killed the process. Start the next process before `finish`, so that
                    # only the key of the job waits for the start.
                    if self._process is None:
                        await self._warm_up()
                finally:
                    self._queue.finish(job)
        finally:
            await self._end_process()

    async def _warm_up(self) -> None:
        """Start the process before a job needs it.

        If the start fails, the next job tries again and reports the error.
        """
        try:
            await self._running_process()
        except (OSError, EOFError) as error:
            logger.warning("A worker process could not be started: %s", error)

    async def _do(self, job: QueuedJob) -> None:
        """Run a job in the current process.

        If the process dies by a signal in _VERDICTS, the job is the cause and gets the signal's
        error. Any other death can have another cause, such as the system's out-of-memory killer.
        The job is then tried once more in a new process.
        """
        for is_again in (False, True):
            # The client has left.
            if job.done.done():
                return
            try:
                reply = await self._ask(await self._running_process(is_again), job)
            except (EOFError, ConnectionError, TimeoutError):
                verdict = _VERDICTS.get(await self._end_process())
                if verdict is not None:
                    job.refuse(verdict)
                    return
            except OSError as error:
                job.refuse(_no_process(error))
                return
            else:
                _settle(job, reply)
                if reply is None:
                    await self._end_process(within_s=0)
                return
        logger.error("One job killed two worker processes in a row")
        job.refuse(RequestError("internal_error", "The server failed on this request."))

    async def _ask(self, process: WorkerProcess, job: QueuedJob) -> Reply | None:
        """Send the job to the process and return the reply.

        Returns None if the client left and the job did not end soon after.
        """
        replying = asyncio.create_task(process.ask(job.head, job.body))
        try:
            await asyncio.wait((replying, job.done), return_when=asyncio.FIRST_COMPLETED)
            if not replying.done():
                await asyncio.wait((replying,), timeout=self._grace_s)
            return replying.result() if replying.done() else None
        finally:
            if not replying.done():
                replying.cancel()
                await asyncio.wait((replying,))

    async def _running_process(self, is_new: bool = False) -> WorkerProcess:
        """Return a living process with the current `start`, replacing the old process if necessary.

        Raises OSError if the system cannot start a process now.
        """
        process = self._process
        if process is None or process.has_ended or process.start != self._source.start:
            await self._end_process()
            self._process = await self._source.take(is_new)
        assert self._process is not None
        return self._process

    async def _end_process(self, within_s: float = 1.0) -> int:
        """End the process, if it exists; return its exit status."""
        process, self._process = self._process, None
        return await process.end(within_s) if process is not None else 0


def _settle(job: QueuedJob, reply: Reply | None) -> None:
    if reply is None or job.done.done():
        return
    refusal, result = reply
    if refusal:
        job.refuse(msgspec.msgpack.decode(refusal, type=Refusal).error())
    else:
        job.done.set_result(result)


def _no_process(error: OSError) -> RequestError:
    return RequestError(
        "server_overloaded",
        f"The server cannot start a worker process now ({error.strerror}); try again later.",
        retry_after_s=5,
    )
