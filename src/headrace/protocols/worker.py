"""A worker process: `python -m headrace.protocols.worker SOCKET`; does jobs, one at a time.

It bounds itself, and its server sees by which signal it died.
"""

import contextlib
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from headrace.core.config import ModelConfig
from headrace.core.errors import RequestError
from headrace.generation.served import ServedModel
from headrace.generation.work import (
    JOB_S,
    MEMORY_BYTES,
    TEMPLATE_S,
    Refusal,
    perform,
    receive,
    reply,
)
from headrace.protocols.jobs import Jobs

logger = logging.getLogger(__name__)

_KEPT_BYTES = MEMORY_BYTES // 4  # beyond what it loaded, between two jobs


def main() -> None:
    with contextlib.suppress(ConnectionError):  # the server has gone, in the middle of a job
        _work(socket.socket(fileno=int(sys.argv[1])))


def _work(connection: socket.socket) -> None:
    start = receive(connection)
    if start is None:
        return
    jobs = Jobs(ServedModel(msgspec.msgpack.decode(start[2], type=ModelConfig)), _rendering)
    loaded = _held_bytes()
    with contextlib.suppress(OSError, ValueError):  # then time alone is bounded
        resource.setrlimit(resource.RLIMIT_DATA, (loaded + MEMORY_BYTES,) * 2)
    reply(connection, b"")
    while (job := receive(connection)) is not None:
        signal.setitimer(signal.ITIMER_VIRTUAL, JOB_S)
        _answer(connection, jobs, *job)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        del job  # before the next one comes: it may be as large
        if _held_bytes() > loaded + _KEPT_BYTES:
            return  # what cannot be given back piece by piece goes with the process


def _answer(
    connection: socket.socket, jobs: Jobs, name: str, arguments: Sequence[Any], body: bytes
) -> None:
    try:
        result, refused = perform(jobs, name, body, arguments), False
    except RequestError as error:
        result, refused = msgspec.msgpack.encode(Refusal.of(error)), True
    except Exception:
        logger.exception("A job failed")
        failure = RequestError("internal_error", "The server failed on this request.")
        result, refused = msgspec.msgpack.encode(Refusal.of(failure)), True
    reply(connection, result, refused)


@contextlib.contextmanager
def _rendering() -> Iterator[None]:
    """A template may be in one call for minutes: only the system can end that."""
    signal.setitimer(signal.ITIMER_PROF, TEMPLATE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _held_bytes() -> int:
    """Memory for data, as RLIMIT_DATA counts it; 0 where the system does not tell."""
    try:
        num_pages = int(Path("/proc/self/statm").read_text().split()[5])
    except OSError:
        return 0
    return num_pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()
