"""Downloads a model in a separate process, which can be killed and continued at any time.

`python -m headrace_common.checkpoints.fetch ID` downloads a model and opens it. With two more
arguments, the revision and the setting `mmproj`, the process only downloads the model and reports
the path. The revision may be empty.

The process writes each event as a line of JSON, and leads a separate process group. The process
ends when its stdin closes. Therefore it also ends when its parent ends.
"""

import asyncio
import os
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator
from typing import Annotated

import msgspec

from headrace_common.checkpoints.find import fetch_model, find_model
from headrace_common.errors import HeadraceError, ModelError

NumBytes = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class Fetched(msgspec.Struct, frozen=True, tag=True):
    """`done` of `total` bytes have arrived."""

    done: NumBytes
    total: NumBytes


class FetchFailed(msgspec.Struct, frozen=True, tag=True):
    """The download has failed. `code` and `message` are for clients; `details` is for the log."""

    code: str
    message: str
    details: str = ""


class IsHere(msgspec.Struct, frozen=True, tag=True):
    """The model is in the cache. `path` is empty if the process has also opened the model."""

    path: str = ""


AnyNews = Fetched | FetchFailed | IsHere
_decode = msgspec.json.Decoder(AnyNews).decode

MAX_LINE = 1 << 16
# Limits in characters. These limits keep a line far below MAX_LINE bytes.
_MAX_MESSAGE, _MAX_DETAILS = 2_000, 8_000
# An endless answer from the hub must not exhaust the machine's memory.
_MEMORY_BYTES = 2 << 30
_TIDY_S = 1.0
MAX_SILENCE_S = 600.0
"""Seconds without progress after which a download is stopped.

A hub may answer slowly for each of hundreds of files, and hashing a large file takes minutes.
"""
SILENT = (
    f"The download made no progress for {MAX_SILENCE_S:g} s and was stopped. The received part "
    "is kept; try again later."
)


class NotNews(HeadraceError):
    """The process wrote something that is not an event."""


async def read_news(stdout: asyncio.StreamReader) -> AsyncIterator[AnyNews]:
    """Yield the newest event of each read. A newer event replaces all earlier events.

    Raises NotNews for a line that is not an event, and for a line of more than MAX_LINE bytes.
    """
    rest = b""
    while piece := await stdout.read(MAX_LINE):
        lines, line_break, rest = (rest + piece).rpartition(b"\n")
        if len(rest) > MAX_LINE:
            raise NotNews(f"The download process wrote a line of more than {MAX_LINE} bytes.")
        if line_break:
            yield read_line(lines.rpartition(b"\n")[2])


def read_line(line: bytes) -> AnyNews:
    """Parse an event. Raises NotNews if the line is not an event."""
    try:
        return _decode(line)
    except (ValueError, RecursionError) as error:
        raise NotNews(f"The download process wrote {line[:200]!r}.") from error


def main(model: str, revision: str | None = None, mmproj: str = "auto") -> None:
    signal.signal(signal.SIGTERM, _end)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, hard))
    news = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    # Libraries also print to stdout, which must contain only events.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def tell(one: AnyNews) -> None:
        news.write(msgspec.json.encode(one) + b"\n")
        news.flush()

    def report(done: int, total: int) -> None:
        tell(Fetched(done, total))

    path = ""
    try:
        if revision is None:
            find_model(model, None, report)
        else:
            path = fetch_model(model, revision or None, report, mmproj)
    # A panic of a Rust library is a BaseException but not an Exception.
    except BaseException as error:
        if isinstance(error, SystemExit):
            raise
        tell(_failure(error))
    else:
        tell(IsHere(path))


def _failure(error: BaseException) -> FetchFailed:
    if isinstance(error, ModelError):
        return FetchFailed(error.code, str(error)[:_MAX_MESSAGE])
    details = "".join(traceback.format_exception(error))[-_MAX_DETAILS:]
    if isinstance(error, OSError) and error.strerror:
        message = (
            f"The model cannot be stored ({error.strerror}); the downloaded part is kept. "
            "Try again."
        )
    else:
        name = type(error).__name__
        message = f"The download failed because of a bug in this server ({name}); see its log."
    return FetchFailed("download_failed", message, details)


def _end(*_: object) -> None:
    """Remove temporary files and end the process within _TIDY_S.

    At exit, the hub's library waits for its own threads. A thread that reads from a slow hub may
    never end. So a timer kills the process group, including installers.
    """
    kill = threading.Timer(_TIDY_S, os.killpg, (0, signal.SIGKILL))
    kill.daemon = True
    kill.start()
    sys.exit(1)


def _end_with_parent() -> None:
    os.read(sys.stdin.fileno(), 1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_TIDY_S)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:4])
