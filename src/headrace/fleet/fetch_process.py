"""Downloads a model in a separate process.

A library that reads a hub's responses can block for a long time or use any amount of memory. So
the gateway itself never contacts a hub.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

from headrace_common.checkpoints.fetch import (
    MAX_LINE,
    MAX_SILENCE_S,
    SILENT,
    AnyNews,
    Fetched,
    FetchFailed,
    IsHere,
    NotNews,
    read_line,
)
from headrace_common.checkpoints.find import MINI, place_of
from headrace_common.checkpoints.hub import OnProgress
from headrace_common.config.settings import ModelConfig
from headrace_common.config.sources import environment_without_keys
from headrace_common.errors import ModelError


def fetch_apart(config: ModelConfig, on_progress: OnProgress) -> str:
    """Return the local path of a model, and download the model first if necessary.

    Raises ModelError if the model is not available. Blocks until the download process has ended.
    """
    if config.model == MINI or place_of(config.model) is not None:
        return config.model
    module = "headrace_common.checkpoints.fetch"
    arguments = ("-m", module, config.model, config.revision or "", config.mmproj)
    news = None
    try:
        with subprocess.Popen(
            [sys.executable, *arguments],
            # The download process ends when this pipe closes, for example because the gateway has
            # died.
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            # Ctrl-C must reach only the gateway. A new session would also work. But Linux may
            # divide the processor among sessions first, and then many workers, each in a session,
            # would starve the gateway.
            process_group=0,
            env=environment_without_keys(),
        ) as process:
            try:
                for news in _reports(process):
                    if isinstance(news, Fetched):
                        on_progress(news.done, news.total)
            except BaseException:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                raise
    except TimeoutError:
        raise ModelError(SILENT, "download_failed") from None
    except (OSError, NotNews):
        raise _failed("failed") from None
    if isinstance(news, IsHere):
        return news.path
    if isinstance(news, FetchFailed):
        failure = ModelError(news.message, news.code)
        if news.details:
            failure.add_note(news.details)
        raise failure
    raise _failed(f"ended without a result (exit code {process.returncode})")


def _reports(process: "subprocess.Popen[bytes]") -> Iterator[AnyNews]:
    """Yield the download process's reports.

    Raises TimeoutError if no new report arrives for MAX_SILENCE_S seconds.
    """
    assert process.stdout is not None
    waiting, rest, last = select.poll(), b"", None
    waiting.register(process.stdout, select.POLLIN)
    deadline = time.monotonic() + MAX_SILENCE_S
    while True:
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not waiting.poll(1000 * left_s):
            raise TimeoutError
        if not (piece := process.stdout.read(MAX_LINE)):
            return
        lines, line_break, rest = (rest + piece).rpartition(b"\n")
        if len(rest) > MAX_LINE:
            raise NotNews("It wrote a line that is too long.")
        if line_break and (news := read_line(lines.rpartition(b"\n")[2])) != last:
            deadline, last = time.monotonic() + MAX_SILENCE_S, news
            yield news


def _failed(how: str) -> ModelError:
    message = f"The download process {how}; the downloaded part is kept. Try again."
    return ModelError(message, "download_failed")
