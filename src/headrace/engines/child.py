"""One engine process as its parent sees it: spawn, talk, last words, kill."""

import asyncio
import collections
import contextlib
import logging
import os
import signal
import socket
import sys
from pathlib import Path

from headrace.engines.client import EngineDown
from headrace_common import wire
from headrace_common.config.sources import SECRETS
from headrace_common.ids import SequenceId
from headrace_common.messages import Message
from headrace_common.system.step_record import StepRecord

logger = logging.getLogger(__name__)

MODULE = "headrace_engine.process"
_LAST_LINES = 200
_LONGEST_LINE = 1 << 16
_LAST_WORDS_S = 1.0
_STDERR_S = 3.0
_POLL_S = 0.01
ENVIRONMENT = {
    # OpenMP reads this when torch loads. By default its threads spin for milliseconds before each
    # loop, and a spinning thread keeps a core from threads that have work.
    "GOMP_SPINCOUNT": "5000",
    # torch asks the system for pages of 2 MiB: many small ones are slower to read.
    "THP_MEM_ALLOC_ENABLE": "1",
}
"""Added to the environment of an engine's process; variables that the user sets win."""


class Child:
    """A running engine process in a group of its own. Made by `spawn`."""

    def __init__(
        self, process: asyncio.subprocess.Process, ours: socket.socket, step_record: StepRecord
    ) -> None:
        self.step_record = step_record
        self._process = process
        self._was_killed = False  # by us
        self._suspects: tuple[SequenceId, ...] = ()
        self._socket = ours
        self.reader: asyncio.StreamReader  # of its messages, until it closes its end
        self._writer: asyncio.StreamWriter
        self._last_lines: collections.deque[str] = collections.deque(maxlen=_LAST_LINES)
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def spawn(cls, number: int = 0, lock_fds: tuple[int, ...] = ()) -> "Child":
        """`lock_fds` are of the files that engines share, and `number` is this one's.

        OSError if the system is out of processes, descriptors or memory; leaves nothing
        open.
        """
        with contextlib.ExitStack() as undo:
            ours, theirs = socket.socketpair()
            undo.enter_context(ours)
            with theirs:
                step_record = StepRecord()
                undo.callback(step_record.close)
                process = await _start(theirs.fileno(), step_record.fd, number, lock_fds)
            child = cls(process, ours, step_record)
            child.reader, child._writer = await asyncio.open_connection(sock=ours)
            undo.pop_all()
        return child

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: Message) -> None:
        """Never blocks; messages to a dead process are dropped."""
        if not self._writer.is_closing():
            self._writer.write(wire.encode(message))

    def kill(self) -> None:
        """Kills the process and everything it started."""
        if self._process.returncode is None:
            self._was_killed = not self._is_stopped()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _is_stopped(self) -> bool:
        """Whether somebody stopped it, as with SIGSTOP: then the hang is not its own fault."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:  # not Linux: there is no way to tell
            return False
        return stat.rpartition(")")[2].split()[0] in "Tt"

    async def end(self) -> None:
        """Waits for a process that is ending, kills one that is not, and frees what it held."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_S):
                await self._exit()
        self.kill()
        await self._exit()
        self._writer.close()
        with contextlib.suppress(TimeoutError):  # a process it started may still hold its stderr
            async with asyncio.timeout(_STDERR_S):
                await self._listening
        self._suspects = self.step_record.read()
        self.step_record.close()

    async def _exit(self) -> None:
        # NOTE: Process.wait() would also wait for everyone who holds stderr.
        while self._process.returncode is None:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)

    def obituary(self) -> EngineDown:
        """How it ended, which step it was in, and its last words; call after `end`."""
        code = self._process.returncode
        assert code is not None
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        words = [f"The engine ended with {how}.", *list(self._last_lines)[-5:]]
        return EngineDown(
            "engine_failed",
            "\n".join(words),
            given_up=False,
            suspects=self._suspects,
            from_outside=code == -signal.SIGKILL and not self._was_killed,
        )

    async def _listen(self) -> None:
        assert self._process.stderr is not None
        rest = b""
        while piece := await self._process.stderr.read(_LONGEST_LINE):
            *lines, rest = (rest + piece).split(b"\n")
            rest = rest[-_LONGEST_LINE:]
            for line in lines:
                self._heard(line)
        if rest:
            self._heard(rest)

    def _heard(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace").rstrip()
        self._last_lines.append(text)
        logger.info("engine: %s", text)


async def _start(
    socket_fd: int, record_fd: int, number: int, lock_fds: tuple[int, ...]
) -> asyncio.subprocess.Process:
    inherited = {k: v for k, v in os.environ.items() if k not in SECRETS}
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        MODULE,
        str(socket_fd),
        str(record_fd),
        str(number),
        *map(str, lock_fds),
        pass_fds=[socket_fd, record_fd, *lock_fds],
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
        env=ENVIRONMENT | inherited,
    )
