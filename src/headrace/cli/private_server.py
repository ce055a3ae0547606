"""A private server: a process on a free port that ends with the verb that started it."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from typing import IO

from headrace.cli.logs import clear, say

_READY = re.compile(r"Headrace is ready at (http://\S+): ")
_END_S = 15.0
_LONGEST_LINE = 1 << 16
_OF_OTHERS = {f"HEADRACE_{name}" for name in ("HOST", "LOG_FORMAT", "SSL_CERTFILE", "SSL_KEYFILE")}
"""Settings that are for other servers: this one speaks plain HTTP, here, and to this verb."""


class ServerEnded(Exception):
    """The server ended before it was ready; `code` says why, and stderr has its words."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


@contextlib.contextmanager
def private_server(model: str) -> Iterator[str]:
    """The address of a server of `model`, once it is ready; ServerEnded if it never is.

    What it says while it loads goes to stderr, and nothing after.
    """
    with tempfile.TemporaryDirectory(prefix="headrace-chat-") as state_dir:
        process = _start(model, state_dir)
        try:
            yield _await_ready(process)
        finally:
            process.terminate()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def own_environment(ours: Mapping[str, str]) -> dict[str, str]:
    """The verb's environment without settings of other servers."""
    return {name: value for name, value in ours.items() if name not in _OF_OTHERS}


def _start(model: str, state_dir: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "headrace.cli.attended", "serve", model]
    return subprocess.Popen(
        [*command, "--port", "0", "--state-dir", state_dir],
        env=own_environment(os.environ),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # Ctrl-C is for an answer, not for the server
    )


def _await_ready(process: "subprocess.Popen[str]") -> str:
    assert process.stderr is not None
    for line in _lines(process.stderr):
        if found := _READY.match(line):
            # Without a reader the server would block. Its later output is discarded.
            threading.Thread(target=deque, args=(_lines(process.stderr), 0), daemon=True).start()
            clear()
            return found[1]
        if " INFO " not in line:
            say(line.rstrip("\n"), moves=line.endswith(" s)\n"))
    raise ServerEnded(process.wait())


def _lines(stream: IO[str]) -> Iterator[str]:
    """Yield lines; a long line comes in pieces."""
    return iter(lambda: stream.readline(_LONGEST_LINE), "")


def end_on_hangup() -> None:
    """A closed terminal, or SIGTERM, ends the verb as Ctrl-C does, and so its server."""

    def leave(number: int, _: object) -> None:
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)
