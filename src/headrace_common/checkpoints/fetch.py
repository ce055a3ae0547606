"""Downloads a model in a process of its own, which may be killed at any time: the next goes on.

`python -m headrace_common.checkpoints.fetch ID` writes a line of JSON for each piece of news. It
leads a group of its own, and ends with its parent: when stdin does. It also opens the model; with
a revision behind the ID, which may be empty, it only downloads, and reports where the model is.
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
    """So many bytes have come."""

    done: NumBytes
    total: NumBytes


class FetchFailed(msgspec.Struct, frozen=True, tag=True):
    """The download has failed. `code` and `message` are for clients, `details` for the log."""

    code: str
    message: str
    details: str = ""


class IsHere(msgspec.Struct, frozen=True, tag=True):
    """All of it is in the cache, at `path` if it was not opened."""

    path: str = ""


AnyNews = Fetched | FetchFailed | IsHere
_decode = msgspec.json.Decoder(AnyNews).decode

MAX_LINE = 1 << 16
_MAX_MESSAGE, _MAX_DETAILS = 2_000, 8_000  # characters: a line stays far below MAX_LINE
_MEMORY_BYTES = 2 << 30  # an answer of the hub without end must not take the machine's memory
_TIDY_S = 1.0
MAX_SILENCE_S = 600.0
"""Seconds without progress after which a download is stopped: a hub may answer slowly for each of
hundreds of files, and the hash of a large file takes minutes."""
SILENT = (
    f"The download made no progress for {MAX_SILENCE_S:g} s and was stopped. "
    "What was received is kept; try again later."
)


class NotNews(HeadraceError):
    """The process wrote something that is not news."""


async def read_news(stdout: asyncio.StreamReader) -> AsyncIterator[AnyNews]:
    """Yield the newest line of each piece that arrives: it makes earlier lines out of date.

    NotNews if it is not a piece of news, or longer than MAX_LINE bytes.
    """
    rest = b""
    while piece := await stdout.read(MAX_LINE):
        lines, line_break, rest = (rest + piece).rpartition(b"\n")
        if len(rest) > MAX_LINE:
            raise NotNews(f"It wrote a line of more than {MAX_LINE} bytes.")
        if line_break:
            yield read_line(lines.rpartition(b"\n")[2])


def read_line(line: bytes) -> AnyNews:
    """Return a piece of news; NotNews if the line is something else."""
    try:
        return _decode(line)
    except (ValueError, RecursionError) as error:
        raise NotNews(f"It wrote {line[:200]!r}.") from error


def main(model: str, revision: str | None = None) -> None:
    signal.signal(signal.SIGTERM, _end)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, hard))
    news = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is not news

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
            path = fetch_model(model, revision or None, report)
    except BaseException as error:  # a library's panic is not an Exception
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
    """End installers, remove temporary files and end the process, all within _TIDY_S.

    The hub's library waits for its threads, and one that reads from a slow hub may never end.
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
    main(*sys.argv[1:3])
