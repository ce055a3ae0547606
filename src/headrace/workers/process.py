"""One worker process: how it is started, asked and ended; and its own side of the socket."""

import asyncio
import contextlib
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from headrace.workers.job_line import Body
from headrace_common.config.sources import SECRETS
from headrace_common.system import awake, framing

STILL_S = 15.0
"""A worker that uses no processor time for this long, with a job in hand, is stopped or hangs."""

_ENVIRONMENT = {
    "TOKENIZERS_PARALLELISM": "false",
    # a library that panics without memory for its traceback deadlocks
    "RUST_BACKTRACE": "0",
    "RUST_LIB_BACKTRACE": "0",
}

Reply = tuple[bytes, bytes]
"""A packed Refusal, or nothing, and the packed result."""


class WorkerProcess:
    """`python -m MODULE SOCKET OPTIONS`, from `begin` to `end`."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        start: bytes,
    ) -> None:
        self.start = start  # what it has begun with
        self._process, self._reader, self._writer = process, reader, writer

    @classmethod
    async def begin(cls, module: str, start: bytes, options: Sequence[str]) -> "WorkerProcess":
        """One that is ready for jobs; OSError if the system gives none now, EOFError if it ends."""
        ours, theirs = socket.socketpair()
        inherited = {k: v for k, v in os.environ.items() if k not in SECRETS}
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
                    start_new_session=True,
                    env=inherited | _ENVIRONMENT,
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
        """Whether the process has ended, as far as is known."""
        return self._reader.at_eof()

    async def ask(self, head: bytes, body: Body) -> Reply:
        """Has it do a job. TimeoutError if it makes no progress, EOFError if it ends."""
        self._writer.writelines([*framing.frame(head), *framing.frame(*body)])
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

    async def end(self, within_s: float = 1.0) -> int:
        """Makes sure that it is dead; returns how it ended. Our own kill is no verdict.

        One that has closed its end is dying, and one that has no job ends when we close ours.
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
        """Processor time used so far; the wall clock where the system does not say."""
        try:
            stat = Path(f"/proc/{self._process.pid}/stat").read_text()
        except OSError:
            return time.monotonic()
        user, system = stat.rpartition(")")[2].split()[11:13]
        return float(int(user) + int(system))


# the other end of the socket, in the worker


def receive(connection: socket.socket) -> tuple[bytes, bytes] | None:
    """The next packed job and its body; None once the server has gone. First comes `start`."""
    head = framing.receive(connection)
    body = None if head is None else framing.receive(connection)
    return None if head is None or body is None else (head, body)


def reply(connection: socket.socket, result: bytes, refusal: bytes = b"") -> None:
    framing.send(connection, refusal, result)
