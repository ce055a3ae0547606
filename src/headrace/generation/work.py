"""Work that grows with what a client sent: done off the event loop, where it can be killed.

A job is a pure function of bytes and a few small arguments; its result is bytes. Jobs run in
worker processes, each with limited memory and processor time, or, naively, in threads.
"""

import asyncio
import itertools
import logging
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import msgspec

from headrace import awake
from headrace.core.config_sources import SECRETS
from headrace.core.errors import RequestError

logger = logging.getLogger(__name__)

TEMPLATE_S = 5.0
"""Processor time that a chat template may take; a worker that takes more gets SIGPROF."""
JOB_S = 60.0
"""Processor time that a whole job may take; a worker that takes more gets SIGVTALRM."""
STILL_S = 15.0
"""A worker that uses no processor time for this long, with a job in hand, is stopped or hangs."""
MEMORY_BYTES = 224 << 20
"""What a worker may hold beyond what it loaded."""

IMAGES = "images"
"""The job that has a worker of its own, at the lowest priority, where the model sees images."""
IMAGE_MEMORY_BYTES = 2 << 30

_TINY_BITS = 12  # jobs of up to 4 KiB are all alike
_LARGE = 64 << 10  # bytes; jobs from this size on share one worker, and leave the other ones free
_NUM_WORKERS = 2
_MAX_WAITING = 1024  # jobs, for one worker
_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    # a library that panics without memory for its traceback deadlocks
    "RUST_BACKTRACE": "0",
    "RUST_LIB_BACKTRACE": "0",
}
_REQUEST = struct.Struct("<II")  # lengths of name and arguments, and of the body
_REPLY = struct.Struct("<?I")  # whether it is a refusal, and its length
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
"""What a worker's death says about its job; after any other death the job is tried again."""


Body = Sequence[bytes | bytearray]
"""The pieces of a body, in order."""


class Work(Protocol):
    """Does jobs by name, whatever they cost."""

    async def do(self, name: str, body: Body, *arguments: Any) -> bytes:
        """The job's result; RequestError if it refuses `body`, or overran."""

    async def run(self) -> None:
        """Owns what does the work, until it is cancelled."""


class Refusal(msgspec.Struct, frozen=True):
    """A RequestError on its way between processes."""

    code: str
    message: str
    param: str | None
    extra: dict[str, int]
    noted: dict[str, int | str]

    @classmethod
    def of(cls, error: RequestError) -> "Refusal":
        return cls(error.code, error.message, error.param, error.extra, error.noted)

    def error(self) -> RequestError:
        error = RequestError(self.code, self.message, self.param, self.extra)
        return error.noting(**self.noted)


def perform(jobs: object, name: str, body: bytes, arguments: Sequence[Any]) -> bytes:
    """The result of one job; RequestError, also where memory ran out."""
    try:
        result: bytes = getattr(jobs, name)(body, *arguments)
    except MemoryError:
        raise _TOO_MUCH from None
    return result


class ThreadWork:
    """Jobs in threads of this process, for callers that limit themselves: LLM, and tests."""

    def __init__(self, jobs: object) -> None:
        self._jobs = jobs
        self._threads = ThreadPoolExecutor(_NUM_WORKERS, thread_name_prefix="work")

    async def do(self, name: str, body: Body, *arguments: Any) -> bytes:
        loop = asyncio.get_running_loop()
        whole = b"".join(body)
        return await loop.run_in_executor(
            self._threads, perform, self._jobs, name, whole, arguments
        )

    async def run(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self._threads.shutdown(wait=False, cancel_futures=True)


class _Job:
    """One call of `WorkerPool.do`."""

    __slots__ = ("done", "frame", "number", "size")

    _numbers = itertools.count()

    def __init__(self, name: str, body: Body, arguments: Sequence[Any]) -> None:
        head = msgspec.msgpack.encode((name, arguments))
        self.number = next(self._numbers)
        self.size = sum(map(len, body))
        self.frame = [_REQUEST.pack(len(head), self.size), head, *body]
        self.done: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    @property
    def load(self) -> int:
        return _LARGE + self.size

    def __lt__(self, other: "_Job") -> bool:
        """Whether it goes first: smaller jobs do; those of about one size keep their order."""
        mine, theirs = self.size.bit_length(), other.size.bit_length()
        return (max(mine, _TINY_BITS), self.number) < (max(theirs, _TINY_BITS), other.number)

    def refuse(self, error: RequestError) -> None:
        if not self.done.done():
            self.done.set_exception(error.with_traceback(None))  # shared: it would grow


class WorkerPool:
    """Jobs in processes of their own: `python -m MODULE SOCKET`; each is sent `start` first."""

    def __init__(self, module: str, start: bytes, has_images: bool = False) -> None:
        self._module = module
        self._tasks: asyncio.TaskGroup | None = None  # while it runs
        self._workers = [_Worker(module, start) for _ in range(_NUM_WORKERS)]
        self._apart = _Worker(module, start, IMAGES) if has_images else None

    async def do(self, name: str, body: Body, *arguments: Any) -> bytes:
        job = _Job(name, body, arguments)
        if name == IMAGES and self._apart is not None:
            self._apart.put(job)
            return await job.done
        large = job.size >= _LARGE
        worker = self._workers[-1] if large else min(self._workers, key=lambda it: it.load)
        worker.put(job)
        return await job.done

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            for worker in self._all:
                tasks.create_task(worker.run(), name="worker")

    @property
    def _all(self) -> tuple["_Worker", ...]:
        return (*self._workers, *([self._apart] if self._apart else ()))

    def renew(self, start: bytes, has_images: bool) -> None:
        """Each worker is sent this before its next job, and so ends the process that it had."""
        for worker in self._all:
            worker.start = start
        if has_images and self._apart is None:
            self._apart = _Worker(self._module, start, IMAGES)
            if self._tasks is not None:
                self._tasks.create_task(self._apart.run(), name="worker")


class _Worker:
    """One process at a time, and the jobs that wait for it."""

    def __init__(self, module: str, start: bytes, *options: str) -> None:
        self._options = options
        self.load = 0  # of the jobs that it has not done
        self._module = module
        self.start = start
        self._began_with = b""  # of the process that lives
        self._jobs: asyncio.PriorityQueue[_Job] = asyncio.PriorityQueue()
        self._has_ended = False
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    def put(self, job: _Job) -> None:
        if self._has_ended or self._jobs.qsize() >= _MAX_WAITING:
            job.refuse(_SHUTDOWN if self._has_ended else _TOO_MANY)
            return
        self.load += job.load
        self._jobs.put_nowait(job)

    async def run(self) -> None:
        try:
            await self._warm_up()
            while True:
                job = await self._jobs.get()
                try:
                    await self._do(job)
                finally:
                    self.load -= job.load
                    job.refuse(_SHUTDOWN)  # unless it is done
                    job.frame.clear()  # a refusal keeps the job in a cycle, but not the body
                if self._process is None:  # the job killed it; the next one should find another
                    await self._warm_up()
        finally:
            self._has_ended = True
            while not self._jobs.empty():
                self._jobs.get_nowait().refuse(_SHUTDOWN)
            await self._bury()

    async def _warm_up(self) -> None:
        """Saves the first job the start; if there can be no process, that job will say so."""
        try:
            await self._living()
        except (OSError, EOFError) as error:
            logger.warning("A worker process could not be started: %s", error)
            await self._bury()

    async def _do(self, job: _Job) -> None:
        for _ in range(2):
            if job.done.done():  # the caller has gone
                return
            try:
                await self._living()
                self._writer.writelines(job.frame)
                refused, reply = await self._reply_in_time()
            except (EOFError, ConnectionError, TimeoutError):
                verdict = _VERDICTS.get(await self._bury())
                if verdict is not None:
                    job.refuse(verdict)
                    return
            except OSError as error:
                job.refuse(_no_process(error))
                return
            else:
                if refused:
                    job.refuse(msgspec.msgpack.decode(reply, type=Refusal).error())
                elif not job.done.done():
                    job.done.set_result(reply)
                return
        logger.error("One job killed two worker processes in a row")
        job.refuse(RequestError("internal_error", "The server failed on this request."))

    async def _living(self) -> None:
        """Starts a process unless one lives; OSError if the system gives none now."""
        is_current = self._began_with == self.start
        if self._process is not None and is_current and not self._reader.at_eof():
            return
        await self._bury()
        ours, theirs = socket.socketpair()
        inherited = {k: v for k, v in os.environ.items() if k not in SECRETS}
        with theirs:
            try:
                self._process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    self._module,
                    str(theirs.fileno()),
                    *self._options,
                    pass_fds=[theirs.fileno()],
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    start_new_session=True,
                    env=inherited | _ENVIRONMENT,
                )
            except BaseException:
                ours.close()
                raise
        self._reader, self._writer = await asyncio.open_connection(sock=ours)
        self._began_with = self.start
        self._writer.writelines([_REQUEST.pack(0, len(self.start)), self.start])
        await self._reply()

    async def _reply(self) -> tuple[bool, bytes]:
        refused, length = _REPLY.unpack(await self._reader.readexactly(_REPLY.size))
        return refused, await self._reader.readexactly(length)

    async def _reply_in_time(self) -> tuple[bool, bytes]:
        """TimeoutError if the worker makes no progress."""
        replying = asyncio.create_task(self._reply())
        try:
            spent = -1.0
            while not await awake.is_done_within(replying, STILL_S):
                before, spent = spent, self._processor_s()
                if spent == before:
                    raise TimeoutError
            return replying.result()
        finally:
            replying.cancel()

    def _processor_s(self) -> float:
        """Processor time used so far; the wall clock where the system does not say."""
        assert self._process is not None
        try:
            stat = Path(f"/proc/{self._process.pid}/stat").read_text()
        except OSError:
            return time.monotonic()
        user, system = stat.rpartition(")")[2].split()[11:13]
        return float(int(user) + int(system))

    async def _bury(self) -> int:
        """Makes sure that the process is dead; returns how it ended. Our own kill is no verdict."""
        if self._process is None:
            return 0
        process, self._process = self._process, None
        self._writer.close()
        if process.returncode is None:
            try:
                async with asyncio.timeout(1):  # it closed its end because it is dying
                    await process.wait()
            except TimeoutError:
                process.kill()
        return await process.wait()


_TOO_MANY = RequestError(
    "server_overloaded",
    f"{_MAX_WAITING} requests are waiting to be read, and that is the limit; try again later.",
    retry_after_s=5,
)
_SHUTDOWN = RequestError("server_shutdown", "The server is shutting down.", retry_after_s=5)


def _no_process(error: OSError) -> RequestError:
    return RequestError(
        "server_overloaded",
        f"The server cannot start a worker process now ({error.strerror}); try again later.",
        retry_after_s=5,
    )


# the other end of the socket, in the worker


def receive(connection: socket.socket) -> tuple[str, Sequence[Any], bytes] | None:
    """The next job; None once the server has gone. The first has no name: it is `start`."""
    lengths = _receive_exactly(connection, _REQUEST.size)
    if lengths is None:
        return None
    num_head, num_body = _REQUEST.unpack(lengths)
    head = _receive_exactly(connection, num_head)
    body = _receive_exactly(connection, num_body)
    if head is None or body is None:
        return None
    name, arguments = msgspec.msgpack.decode(head) if head else ("", ())
    return name, arguments, body


def reply(connection: socket.socket, result: bytes, refused: bool = False) -> None:
    connection.sendall(_REPLY.pack(refused, len(result)))
    connection.sendall(result)


def _receive_exactly(connection: socket.socket, size: int) -> bytes | None:
    """Without a copy: a body may be most of what the worker may hold."""
    data = bytearray(size)
    view, have = memoryview(data), 0
    while have < size:
        num_read = connection.recv_into(view[have:])
        if num_read == 0:
            return None
        have += num_read
    return data  # type: ignore[return-value]
