"""One engine process as its parent sees it: spawn, talk, last words, kill."""

import asyncio
import collections
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator

from headrace.core.messages import AnyMessage, Message
from headrace.engine import wire

logger = logging.getLogger(__name__)

_LAST_LINES = 200
_KEPT_FROM_IT = ("HEADRACE_API_KEYS", "HEADRACE_ADMIN_KEY")


class Child:
    """A running engine process in a group of its own. Made by `spawn`."""

    def __init__(self, process: asyncio.subprocess.Process, ours: socket.socket) -> None:
        self._process = process
        self._socket = ours
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter
        self._last_lines: collections.deque[str] = collections.deque(maxlen=_LAST_LINES)
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def spawn(cls) -> "Child":
        ours, theirs = socket.socketpair()
        environment = {k: v for k, v in os.environ.items() if k not in _KEPT_FROM_IT}
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "headrace.engine.process",
                str(theirs.fileno()),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
                env=environment,
            )
        child = cls(process, ours)
        child._reader, child._writer = await asyncio.open_connection(sock=ours)
        return child

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: Message) -> None:
        """Never blocks; what a dead process does not take is dropped."""
        if not self._writer.is_closing():
            self._writer.write(wire.encode(message))

    async def messages(self) -> AsyncIterator[AnyMessage]:
        """Until the process closes its end, which is how its death is noticed."""
        try:
            while True:
                yield await wire.read(self._reader)
        except (asyncio.IncompleteReadError, ConnectionError):
            return

    async def kill(self) -> str:
        """Ends what is left of it and says how it ended, with its last words."""
        if self._process.returncode is None:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                self._process.kill()
        return await self.wait()

    async def wait(self) -> str:
        """How it ended, once it has."""
        code = await self._process.wait()
        self._writer.close()
        await self._listening
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return "\n".join([f"The engine ended with {how}.", *list(self._last_lines)[-5:]])

    async def _listen(self) -> None:
        assert self._process.stderr is not None
        async for line in self._process.stderr:
            text = line.decode("utf-8", "replace").rstrip()
            self._last_lines.append(text)
            logger.info("engine: %s", text)
