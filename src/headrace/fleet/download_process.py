"""Starts and ends the process that downloads a model on request."""

import asyncio
import contextlib
import os
import signal
import sys

from headrace_common.checkpoints.fetch import MAX_LINE
from headrace_common.config.sources import environment_without_keys

_END_S = 2.0


class DownloadProcess:
    """The process writes its reports to `stdout`, a line of JSON each."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        self.stdout = process.stdout
        self._process = process

    @classmethod
    async def begin(cls, model: str) -> "DownloadProcess":
        """Start a process that downloads the model; OSError if no process can be started."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "headrace_common.checkpoints.fetch", model),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            # Ctrl-C must reach only the gateway. A new session would also work. But Linux may
            # divide the processor among sessions first, and then many workers, each in a session,
            # would starve the gateway.
            preexec_fn=os.setpgrp,
            env=environment_without_keys(),
        )
        return cls(process)

    async def wait(self) -> int:
        """Wait for the end of the process, and return the exit code."""
        return await self._process.wait()

    async def end(self) -> None:
        """Terminate the process; after `_END_S` seconds, kill the process if it still runs."""
        process = self._process
        with contextlib.suppress(ProcessLookupError, TimeoutError):
            process.terminate()
            await asyncio.wait_for(process.wait(), _END_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
        # asyncio keeps the pipe open while it has unread output.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_END_S):
                while await self.stdout.read(MAX_LINE):
                    pass
