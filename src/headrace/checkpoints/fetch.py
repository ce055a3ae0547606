"""Downloads a model in a process of its own, which may be killed at any time: the next goes on.

`python -m headrace.checkpoints.fetch ID` writes a line of JSON for each piece of news. It leads a
group of its own, and ends with its parent: when stdin does.
"""

import os
import signal
import sys
import threading
import time

import msgspec

from headrace.checkpoints.find import find_model
from headrace.core.errors import ModelError


class Fetched(msgspec.Struct, frozen=True, tag=True):
    """So many bytes have come."""

    done: int
    total: int


class FetchFailed(msgspec.Struct, frozen=True, tag=True):
    """Nothing more comes; `code` and `message` are a ModelError's."""

    code: str
    message: str


class IsHere(msgspec.Struct, frozen=True, tag=True):
    """All of it is in the cache."""


AnyNews = Fetched | FetchFailed | IsHere
decode_news = msgspec.json.Decoder(AnyNews).decode


_TIDY_S = 5.0


def main(model: str) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # installers are ended, scratch removed
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        find_model(model, None, lambda done, total: _tell(Fetched(done, total)))
    except ModelError as error:
        _tell(FetchFailed(error.code, str(error)))
    else:
        _tell(IsHere())


def _tell(news: AnyNews) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(news) + b"\n")
    sys.stdout.buffer.flush()


def _end_with_parent() -> None:
    os.read(sys.stdin.fileno(), 1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_TIDY_S)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1])
