"""Answers on the server's address while its model is still being downloaded."""

import socket
import threading
from collections.abc import Callable

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.gateway.answers import answer, refuse
from headrace.gateway.http_server import HttpServer
from headrace.gateway.state_routes import UNABLE, unhealthy


class LoadingServer:
    """Opens when it is told that a download goes on; `/health` then says how far it is.

    A context: once left, the listener is the server's alone.
    """

    def __init__(self, listener: socket.socket, on_progress: Callable[[int, int], None]) -> None:
        self._listener, self._on_progress = listener, on_progress
        self._download = {"bytes_done": 0, "bytes_total": 0}
        app = Starlette(
            routes=[
                Route("/health/live", self._live),
                Route("/health", self._health),
                Route("/v1/health", self._health),
            ],
            exception_handlers={404: self._refuse, 405: self._refuse},
        )
        self._server = HttpServer(app)
        self._thread = threading.Thread(target=self._run, name="waiting room", daemon=True)

    def __enter__(self) -> "LoadingServer":
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():
            self._server.should_exit = True
            self._thread.join()

    def __call__(self, done: int, total: int) -> None:
        """Bytes that have come, and that shall."""
        self._download = {"bytes_done": done, "bytes_total": total}
        self._on_progress(done, total)
        if done < total and not self._thread.is_alive():
            self._thread.start()

    def _run(self) -> None:
        with self._listener.dup() as own:
            self._server.run(sockets=[own])

    async def _live(self, request: Request) -> Response:
        return answer({"status": "ok"})

    async def _health(self, request: Request) -> Response:
        return unhealthy("loading", download=self._download)

    async def _refuse(self, request: Request, error: Exception) -> Response:
        return refuse(UNABLE["loading"])
