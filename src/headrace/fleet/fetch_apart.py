"""Downloads a model for a host, in a process of its own.

What a hub answers is read by libraries that may wait long or take any amount of memory for it, so
the gateway does not ask a hub itself.
"""

import os
import subprocess
import sys

from headrace.checkpoints.fetch import MAX_LINE, Fetched, FetchFailed, IsHere, NotNews, read_line
from headrace.checkpoints.find import MINI, place_of
from headrace.checkpoints.hub import OnProgress
from headrace.config.settings import ModelConfig
from headrace.config.sources import SECRETS
from headrace.core.errors import ModelError


def fetch_apart(config: ModelConfig, on_progress: OnProgress) -> str:
    """Return the path of a model on this machine, after its download if it must be fetched.

    ModelError if it cannot be had. Blocks until the process has ended.
    """
    if config.model == MINI or place_of(config.model) is not None:
        return config.model
    arguments = ("-m", "headrace.checkpoints.fetch", config.model, config.revision or "")
    news = None
    try:
        with subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,  # the process ends when this is closed
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={k: v for k, v in os.environ.items() if k not in SECRETS},
        ) as process:
            assert process.stdout is not None
            while line := process.stdout.readline(MAX_LINE):
                news = read_line(line)
                if isinstance(news, Fetched):
                    on_progress(news.done, news.total)
    except (OSError, NotNews):
        raise _failed("failed") from None
    if isinstance(news, IsHere):
        return news.path
    if isinstance(news, FetchFailed):
        failure = ModelError(news.message, news.code)
        if news.details:
            failure.add_note(news.details)
        raise failure
    raise _failed(f"ended with the code {process.returncode}")


def _failed(how: str) -> ModelError:
    message = f"The process that downloads it {how}; the downloaded part is kept. Try again."
    return ModelError(message, "download_failed")
