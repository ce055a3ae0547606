"""Starts real servers for tests. Each server is a process on a free port."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

import httpx

from tools.harness import processes
from tools.harness.sse import data_of

LOAD_TIMEOUT_S = 300
_LOADS = re.compile(r"headrace: .*\.\.\.")


def said(stderr: str) -> list[str]:
    """Return the lines of stderr, except lines that report the progress of loading."""
    return [line for line in stderr.splitlines() if not _LOADS.fullmatch(line)]


class ServerProcess:
    """A running `headrace serve`; `lines` contains the lines that the server wrote to stderr.

    `prefix` is a command that executes its arguments in the same process, for instance with a
    limit. `program` starts a different version of Headrace.
    """

    def __init__(
        self,
        *flags: str,
        environment: dict[str, str] | None = None,
        prefix: tuple[str, ...] = (),
        program: tuple[str, ...] = (sys.executable, "-m", "headrace"),
    ) -> None:
        self.lines: list[str] = []
        self.url = ""
        self._ready = threading.Event()
        state = tempfile.mkdtemp(prefix="headrace-test-")
        inherited = dict(os.environ)
        # In the user's own cache folder, a server under test stores no prefixes.
        if "XDG_CACHE_HOME" in (environment or {}):
            inherited.pop("HEADRACE_PREFIX_CACHE_DIR", None)
        else:
            inherited["HEADRACE_PREFIX_CACHE_DIR"] = "none"
        self.process = subprocess.Popen(
            [*prefix, *program, "serve", "--port", "0", *flags],
            stderr=subprocess.PIPE,
            text=True,
            env={
                **inherited,
                "OMP_NUM_THREADS": "1",
                "XDG_STATE_HOME": state,
                **(environment or {}),
            },
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_until_ready(self) -> "ServerProcess":
        assert self._ready.wait(LOAD_TIMEOUT_S) and self.url, "\n".join(self.lines)
        return self

    @property
    def engine_pid(self) -> int:
        """The process id of the server's engine, or of the first engine if there are several."""
        return processes.engines(self.process.pid)[0]

    def kill_engine(self) -> None:
        os.kill(self.engine_pid, signal.SIGKILL)

    def stop(self, number: int = signal.SIGTERM, within_s: float = 60) -> int:
        """Sends the signal and returns the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        code = self.process.wait(timeout=within_s)
        self._reader.join(timeout=5)
        return code

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())
            if found := re.match(r"Headrace is ready at (https?://\S+?):? ", line):
                self.url = found[1].rstrip(":")
                self._ready.set()
        self._ready.set()


def stream_text(server: ServerProcess, body: dict[str, Any], kill_after: int | None = None) -> str:
    """Returns the text of a streamed completion.

    Kills the engine after `kill_after` frames with text; asserts that this killed an engine.
    """
    texts: list[str] = []
    engine = server.engine_pid
    url = f"{server.url}/v1/completions"
    with httpx.stream("POST", url, json=body | {"stream": True}, timeout=300) as answer:
        for frame in data_of(answer.iter_lines()):
            texts += [choice["text"] for choice in frame["choices"]]
            if len(texts) == kill_after:
                server.kill_engine()
    assert kill_after is None or server.engine_pid != engine, "the answer ended before the kill"
    return "".join(texts)


@contextlib.contextmanager
def running_server(*flags: str, **kwargs: dict[str, str]) -> Iterator[ServerProcess]:
    """Starts a server, waits until the server answers, and stops the server at the end."""
    server = ServerProcess(*flags, **kwargs)
    try:
        yield server.wait_until_ready()
    finally:
        server.stop()
