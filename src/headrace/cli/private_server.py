"""Starts a private server on a free port. The server ends with the command that started it."""

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

import msgspec

from headrace.cli.load_lines import LoadView
from headrace.cli.logs import say
from headrace_common.loading import LoadProgress

_READY = re.compile(r"Headrace is ready at (http://\S+): ")
_END_S = 15.0
_LONGEST_LINE = 1 << 16
_NOT_FOR_US = {f"HEADRACE_{name}" for name in ("HOST", "LOG_FORMAT", "SSL_CERTFILE", "SSL_KEYFILE")}
"""Settings meant for other servers. A private server serves only this command, over plain HTTP."""


class ServerEnded(Exception):
    """The server ended with exit code `code` before it was ready. Its messages are on stderr."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


@contextlib.contextmanager
def private_server(model: str, *flags: str) -> Iterator[str]:
    """Start a server for `model` with these flags, and yield its address when it is ready.

    Raises ServerEnded. Until the server is ready, its messages go to stderr; later output is
    discarded. The server's streams are deleted at its end. Its prefixes stay in the folder that all
    servers share, because the next session with the same agent begins with the same tokens.
    """
    with tempfile.TemporaryDirectory(prefix="headrace-private-") as state_dir:
        process = _start(model, state_dir, flags)
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
    """Return the environment without settings that are meant for other servers."""
    kept = {name: value for name, value in ours.items() if name not in _NOT_FOR_US}
    # `none` also turns prefixes on disk off, but a private server gets another --state-dir.
    if ours.get("HEADRACE_STATE_DIR") == "none":
        kept.setdefault("HEADRACE_PREFIX_CACHE_DIR", "none")
    return kept


def _start(model: str, state_dir: str, flags: tuple[str, ...]) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "headrace.cli.parent_watch", "serve", model]
    return subprocess.Popen(
        [*command, "--port", "0", "--state-dir", state_dir, *flags],
        env=own_environment(os.environ),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        # Ctrl-C should stop an answer and not the server.
        start_new_session=True,
    )


def _await_ready(process: "subprocess.Popen[str]") -> str:
    assert process.stderr is not None
    with LoadView() as view:
        for line in _lines(process.stderr):
            if found := _READY.match(line):
                # Read and discard the later output, because without a reader the server blocks.
                rest = _lines(process.stderr)
                threading.Thread(target=deque, args=(rest, 0), daemon=True).start()
                return found[1]
            try:
                view(msgspec.json.decode(line, type=LoadProgress))
            except msgspec.MsgspecError:
                if " INFO " not in line:
                    say(line.rstrip("\n"))
    raise ServerEnded(process.wait())


def _lines(stream: IO[str]) -> Iterator[str]:
    """Yield the lines; a long line is split into pieces."""
    return iter(lambda: stream.readline(_LONGEST_LINE), "")


def end_on_hangup() -> None:
    """End the command and its server when the terminal closes or SIGTERM arrives."""

    def leave(number: int, _: object) -> None:
        sys.exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)
