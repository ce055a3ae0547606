"""Runs one engine process: spawns it, exchanges messages with it, and reports how it ended."""

import asyncio
import collections
import contextlib
import logging
import os
import re
import signal
import socket
import sys
from pathlib import Path

from headrace.engines.client import EngineDown
from headrace_common import wire
from headrace_common.config.sources import environment_without_keys
from headrace_common.ids import SequenceId
from headrace_common.messages import Message
from headrace_common.system.step_record import StepRecord

logger = logging.getLogger(__name__)

MODULE = "headrace_engine.process"
_LAST_LINES = 200
# A line of the engine's log, in the format that the engine's process sets.
_LOG_LINE = re.compile(r"(?P<level>INFO|WARNING|ERROR|CRITICAL) headrace[\w.]*: (?P<message>.*)")
_LONGEST_LINE = 1 << 16
_LAST_WORDS_S = 1.0
_STDERR_S = 3.0
_POLL_S = 0.01
ENVIRONMENT = {
    # OpenMP reads this variable when torch loads. By default, OpenMP's threads spin for
    # milliseconds before each loop, and a spinning thread keeps a core from threads with work.
    "GOMP_SPINCOUNT": "5000",
    # With this variable, torch asks the system for pages of 2 MiB. Small pages are slower to read.
    "THP_MEM_ALLOC_ENABLE": "1",
}
"""Variables added to an engine's environment. The user's variables take precedence."""


class Child:
    """An engine process in a separate process group, created by `spawn`."""

    def __init__(
        self, process: asyncio.subprocess.Process, local: socket.socket, step_record: StepRecord
    ) -> None:
        self.step_record = step_record
        self._process = process
        # True if this class sent the kill signal.
        self._was_killed = False
        self._suspects: tuple[SequenceId, ...] = ()
        self._socket = local
        # The stream of the engine's messages. It ends when the engine closes its end of the socket.
        self.reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter
        self._last_lines: collections.deque[str] = collections.deque(maxlen=_LAST_LINES)
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def spawn(cls, number: int = 0, lock_fds: tuple[int, ...] = ()) -> "Child":
        """Start an engine process.

        `number` is the engine's index among the engines of this server. `lock_fds` are descriptors
        of the lock files that the server's engines share. Raises OSError if the system lacks
        processes, descriptors or memory; no descriptor stays open then.
        """
        with contextlib.ExitStack() as undo:
            local, remote = socket.socketpair()
            undo.enter_context(local)
            with remote:
                step_record = StepRecord()
                undo.callback(step_record.close)
                process = await _start(remote.fileno(), step_record.fd, number, lock_fds)
            child = cls(process, local, step_record)
            child.reader, child._writer = await asyncio.open_connection(sock=local)
            undo.pop_all()
        return child

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: Message) -> None:
        """Send without blocking; messages to a dead process are dropped."""
        if not self._writer.is_closing():
            self._writer.write(wire.encode(message))

    def kill(self) -> None:
        """Kill the process group."""
        if self._process.returncode is None:
            self._was_killed = not self._is_stopped()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _is_stopped(self) -> bool:
        """Return whether a user or a program stopped the process, for example with SIGSTOP.

        A stopped process cannot answer pings, so its silence is not the engine's fault.
        """
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        # Systems other than Linux have no such file.
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] in "Tt"

    async def end(self) -> None:
        """Wait briefly for the process to exit, then kill it if necessary. Free its resources."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_S):
                await self._exit()
        self.kill()
        await self._exit()
        self._writer.close()
        # A process that the engine started can still hold the engine's stderr open.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STDERR_S):
                await self._listening
        self._suspects = self.step_record.read()
        self.step_record.close()

    async def _exit(self) -> None:
        # Process.wait() would also wait for every other process that holds stderr.
        while self._process.returncode is None:  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)

    def death_report(self) -> EngineDown:
        """Describe the end of the process: its last step and its last lines of stderr.

        Call `death_report` after `end`.
        """
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
                self._log_line(line)
        if rest:
            self._log_line(rest)

    def _log_line(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace").rstrip()
        logged = _LOG_LINE.fullmatch(text)
        if logged is None or logged["level"] != "INFO":
            self._last_lines.append(text)
        if logged is None:
            logger.info("engine: %s", text)
        else:
            level = logging.getLevelNamesMapping()[logged["level"]]
            logger.log(level, "engine: %s", logged["message"])


async def _start(
    socket_fd: int, record_fd: int, number: int, lock_fds: tuple[int, ...]
) -> asyncio.subprocess.Process:
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
        # Ctrl-C must reach only the gateway. A new session would have the same effect. But Linux
        # can divide processor time between sessions first, so many workers would starve the
        # gateway.
        preexec_fn=os.setpgrp,
        env=ENVIRONMENT | environment_without_keys(),
    )
