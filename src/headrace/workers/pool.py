"""Work that grows with what a client sent: done off the event loop, where it can be killed.

A job (core/jobs.py) is a pure function of its message and a body. Jobs run in worker processes,
each with limited memory and processor time, or, naively, in threads.
"""

import asyncio
import logging
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

import msgspec

from headrace.workers.job_line import Body, JobLine, QueuedJob
from headrace.workers.process import Reply, WorkerProcess
from headrace_common.errors import RequestError
from headrace_common.jobs import (
    AnyJob,
    Job,
    Refusal,
    decode_job,
    decode_result,
    encode_job,
    encode_result,
)
from headrace_common.system.panics import STEERING
from headrace_common.system.race import race

logger = logging.getLogger(__name__)

R = TypeVar("R")

TEMPLATE_S = 5.0
"""Processor time that a chat template may take; a worker that takes more gets SIGPROF."""
JOB_S = 60.0
"""Processor time that a whole job may take; a worker that takes more gets SIGVTALRM."""
MEMORY_BYTES = 224 << 20
"""Memory that a worker may hold beyond what it loaded."""

IMAGES = "images"
"""The option of the worker for images: of its own, at the lowest priority."""
IMAGE_MEMORY_BYTES = 2 << 30

_NUM_WORKERS = 2  # one for small jobs alone
_LEFT_S = 0.1  # that a job may go on after its client has left, until its worker is killed
_IMAGES_LEFT_S = 5.0  # where another worker takes longer to start than most jobs take
_TOO_MUCH = RequestError(
    "request_too_large",
    f"Reading and tokenizing this request takes more than {MEMORY_BYTES >> 20} MiB of memory or "
    f"{JOB_S:g} seconds of processor time; send less.",
)
_VERDICTS = {
    -signal.SIGPROF: RequestError(
        "template_failed",
        f"The chat template overran: it took more than {TEMPLATE_S:g} seconds.",
        "messages",
    ),
    -signal.SIGVTALRM: _TOO_MUCH,
    -signal.SIGABRT: _TOO_MUCH,  # a library ran out of memory
    -signal.SIGSEGV: _TOO_MUCH,
}
"""Errors that a worker's death means for its job; after any other death it is tried again."""


class Work(Protocol):
    """Does jobs, whatever they cost."""

    async def do(self, job: Job[R], body: Body = ()) -> R:
        """The job's result; RequestError if it refuses `body`, or overran."""

    async def run(self) -> None:
        """Owns what does the work, until it is cancelled."""


class Performer(Protocol):
    """The side of a worker that knows how jobs are done."""

    def do(self, job: AnyJob, body: bytes) -> object:
        """The job's result; RequestError if it refuses `body`."""


def perform(jobs: Performer, head: bytes, body: bytes) -> bytes:
    """The packed result of the job in `head`; RequestError, also where memory ran out."""
    try:
        return encode_result(jobs.do(decode_job(head), body))
    except MemoryError:
        raise _TOO_MUCH from None
    except (Exception, *STEERING):
        raise
    except BaseException as panic:  # ends this job, and neither its worker nor a thread
        raise RuntimeError(f"a library failed ({type(panic).__name__})") from None


class ThreadWork:
    """Jobs in threads of this process, for callers that limit themselves: LLM, and tests."""

    def __init__(self, jobs: Performer) -> None:
        self._jobs = jobs
        self._threads = ThreadPoolExecutor(_NUM_WORKERS, thread_name_prefix="work")

    async def do(self, job: Job[R], body: Body = ()) -> R:
        asked = (self._jobs, encode_job(job), b"".join(body))
        running = asyncio.get_running_loop().run_in_executor(self._threads, perform, *asked)
        return decode_result(job, await running)

    async def run(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self._threads.shutdown(wait=False, cancel_futures=True)


class WorkerPool:
    """Jobs in processes of their own: `python -m MODULE SOCKET`; each is sent `start` first.

    With `has_keys` there is one more, so that large bodies of two keys can be in work.
    """

    def __init__(
        self, module: str, start: bytes, has_images: bool = False, has_keys: bool = False
    ) -> None:
        num_workers = _NUM_WORKERS + has_keys
        self._tasks: asyncio.TaskGroup | None = None  # while it runs
        self._line = JobLine(num_workers)
        self._source = _Source(module, start)
        self._workers = [
            _Worker(self._line, self._source, takes_large=number > 0)
            for number in range(num_workers)
        ]
        self._module = module
        self._image_line = JobLine(1)
        self._images: _Source | None = _Source(module, start, IMAGES) if has_images else None

    async def do(self, job: Job[R], body: Body = ()) -> R:
        queued = QueuedJob(encode_job(job), body)
        line = self._image_line if job.is_for_images and self._images else self._line
        line.put(queued)
        try:
            return decode_result(job, await queued.done)
        finally:
            line.leave(queued)

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                for worker in self._workers:
                    tasks.create_task(worker.run(), name="worker")
                tasks.create_task(self._source.keep_spare(), name="spare worker")
                self._run_images()
        finally:
            self._line.close()
            self._image_line.close()

    def _run_images(self) -> None:
        if self._tasks is not None and self._images is not None:
            worker = _Worker(self._image_line, self._images, left_s=_IMAGES_LEFT_S)
            self._tasks.create_task(worker.run(), name="image worker")

    def renew(self, start: bytes, has_images: bool) -> None:
        """Each worker is sent this before its next job, and so ends the process that it had."""
        self._source.start = start
        if self._images is not None:
            self._images.start = start
        elif has_images:
            self._images = _Source(self._module, start, IMAGES)
            self._run_images()


class _Source:
    """Processes that have begun with `start`, and a spare one, so that nobody waits for a start."""

    def __init__(self, module: str, start: bytes, *options: str) -> None:
        self.start = start
        self._module, self._options = module, options
        self._spare: WorkerProcess | None = None
        self._wants_spare = asyncio.Event()

    async def take(self, is_new: bool = False) -> WorkerProcess:
        """One that is ready, or will be; OSError if the system gives none now."""
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
        """Keeps a spare worker, from the first one that was taken on."""
        try:
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
        return await WorkerProcess.begin(self._module, self.start, self._options)


class _Worker:
    """One process at a time, for the jobs of a line."""

    def __init__(
        self, line: JobLine, source: _Source, takes_large: bool = True, left_s: float = _LEFT_S
    ) -> None:
        self._line, self._source = line, source
        self._takes_large = takes_large
        self._left_s = left_s
        self._process: WorkerProcess | None = None

    async def run(self) -> None:
        try:
            await self._warm_up()
            while True:
                job = await self._line.next(self._takes_large)
                try:
                    await self._do(job)
                    if self._process is None:  # the job killed it; so its key waits for the next
                        await self._warm_up()
                finally:
                    self._line.finish(job)
        finally:
            await self._bury()

    async def _warm_up(self) -> None:
        """Saves the first job the start; if there can be no process, that job will say so."""
        try:
            await self._living()
        except (OSError, EOFError) as error:
            logger.warning("A worker process could not be started: %s", error)

    async def _do(self, job: QueuedJob) -> None:
        for is_again in (False, True):
            if job.done.done():  # the client has left
                return
            try:
                found = await self._ask(await self._living(is_again), job)
            except (EOFError, ConnectionError, TimeoutError):
                verdict = _VERDICTS.get(await self._bury())
                if verdict is not None:
                    job.refuse(verdict)
                    return
            except OSError as error:
                job.refuse(_no_process(error))
                return
            else:
                _settle(job, found)
                if found is None:
                    await self._bury(within_s=0)
                return
        logger.error("One job killed two worker processes in a row")
        job.refuse(RequestError("internal_error", "The server failed on this request."))

    async def _ask(self, process: WorkerProcess, job: QueuedJob) -> Reply | None:
        """None if the client left, and the job did not end soon after."""
        async with race(process.ask(job.head, job.body), job.done) as (replying, _):
            await asyncio.wait((replying,), timeout=self._left_s)
            return replying.result() if replying.done() else None

    async def _living(self, is_new: bool = False) -> WorkerProcess:
        """OSError if there is none, and the system gives none now."""
        process = self._process
        if process is None or process.has_ended or process.start != self._source.start:
            await self._bury()
            self._process = await self._source.take(is_new)
        assert self._process is not None
        return self._process

    async def _bury(self, within_s: float = 1.0) -> int:
        """Ends the process, if there is one; returns how it ended."""
        process, self._process = self._process, None
        return await process.end(within_s) if process is not None else 0


def _settle(job: QueuedJob, found: Reply | None) -> None:
    if found is None or job.done.done():
        return
    refusal, result = found
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
