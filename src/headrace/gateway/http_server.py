"""uvicorn, as our processes run it."""

import contextlib
from collections.abc import Iterator

import uvicorn


class HttpServer(uvicorn.Server):
    """Without signal handlers: whoever starts it decides when it ends."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
