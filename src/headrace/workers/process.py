"""Starts, uses and ends a worker process. Also has the worker's side of the socket."""

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from headrace.workers.job_queue import Body
from headrace_common.config.sources import environment_without_keys
from headrace_common.system import awake, framing

STILL_S = 15.0
"""A worker that uses no processor time for this many seconds of a job is suspended or hangs."""

_UNWATCHED_S = 0.1
_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    # With backtraces, a Rust library deadlocks if it panics after memory has run out.
    "RUST_BACKTRACE": "0",
    "RUST_LIB_BACKTRACE": "0",
}

Reply = tuple[bytes, bytes]
"""A packed Refusal, which is empty if the job succeeded, and the packed result."""


class WorkerProcess:
    """A running `python -m MODULE SOCKET OPTIONS`, created by `begin` and ended by `end`."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        start: bytes,
    ) -> None:
        # The first message to the process.
        self.start = start
        self._process, self._reader, self._writer = process, reader, writer

    @classmethod
    async def begin(cls, module: str, start: bytes, options: Sequence[str]) -> "WorkerProcess":
        """Start a worker; return it when it is ready for jobs.

        Raises OSError if the system cannot start a process now, and EOFError if the process ends
        before it is ready.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = await asyncio.create_subprocess_exec(
                    sys.executable,
                    "-m",
                    module,
                    str(theirs.fileno()),
                    *options,
                    pass_fds=[theirs.fileno()],
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.DEVNULL,
                    # Ctrl-C must reach only the gateway. A new session would have the same effect.
                    # But Linux can divide processor time between sessions first, so many workers
                    # would starve the gateway.
                    preexec_fn=os.setpgrp,
                    env=environment_without_keys() | _ENVIRONMENT,
                )
            except BaseException:
                ours.close()
                raise
        begun = cls(process, *await asyncio.open_connection(sock=ours), start)
        try:
            begun._writer.writelines([*framing.frame(), *framing.frame(start)])
            await begun._reply()
        except BaseException:
            await begun.end()
            raise
        return begun

    @property
    def has_ended(self) -> bool:
        """Return whether the process has closed its end of the socket."""
        return self._reader.at_eof()

    async def ask(self, head: bytes, body: Body) -> Reply:
        """Send a job and return the reply.

        Raises TimeoutError if the worker makes no progress, and EOFError if the worker ends. A
        worker that uses processor time makes progress, so a slow machine does not count as a hang.
        """
        self._writer.writelines([*framing.frame(head), *framing.frame(*body)])
        replying = asyncio.create_task(self._reply())
        try:
            spent = -1.0
            # Most jobs take milliseconds, so their progress is not checked.
            await asyncio.wait((replying,), timeout=_UNWATCHED_S)
            while not replying.done() and not await awake.is_done_within(replying, STILL_S):
                before, spent = spent, self._processor_s()
                if spent == before:
                    raise TimeoutError
            return replying.result()
        finally:
            replying.cancel()

    async def end(self, within_s: float = 1.0) -> int:
        """Make sure that the process is dead; return its exit status.

        This side's end of the socket is closed, so an idle worker exits. A worker that has closed
        its end is already exiting. Only a worker that is still busy after `within_s` is killed. The
        exit status therefore shows whether a signal killed the worker before.
        """
        self._writer.transport.abort()
        if self._process.returncode is None:
            try:
                async with asyncio.timeout(within_s):
                    await self._process.wait()
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
        return await self._process.wait()

    async def _reply(self) -> Reply:
        return await framing.read(self._reader), await framing.read(self._reader)

    def _processor_s(self) -> float:
        """Return the processor time used so far. If it is unknown, return the wall-clock time."""
        try:
            stat = Path(f"/proc/{self._process.pid}/stat").read_text()
        except OSError:
            return time.monotonic()
        user, system = stat.rpartition(")")[2].split()[11:13]
        return float(int(user) + int(system))


# The functions below are the worker's side of the socket.


def receive(connection: socket.socket) -> tuple[bytes, bytes] | None:
    """Return the next packed job and its body; None if the server has closed the socket.

    The first call returns an empty job and the `start` message.
    """
    head = framing.receive(connection)
    body = None if head is None else framing.receive(connection)
    return None if head is None or body is None else (head, body)


def reply(connection: socket.socket, result: bytes, refusal: bytes = b"") -> None:
    framing.send(connection, refusal, result)
