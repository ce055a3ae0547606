"""Answers requests while the first model is loading, and reports the progress of this load."""

import socket
import ssl
import threading

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from headrace.fleet.load_progress import LoadProgressWatch
from headrace.gateway.http_responses import answer, refuse
from headrace.gateway.http_server import HttpServer
from headrace.gateway.middleware import PathPrefix
from headrace.gateway.state_routes import UNAVAILABLE, loading_of, unhealthy
from headrace.gateway.web_routes import web_routes

# This server starts only if a load takes longer than this many seconds.
_SHORT_READ_S = 0.5


class LoadingServer:
    """Serves `/health`, `/ping` and the web page during a model's load, if the load takes long.

    All of them show the progress. The server is a context manager: after the context, only the real
    server uses the listener.
    """

    def __init__(
        self,
        listener: socket.socket,
        watch: LoadProgressWatch,
        tls: ssl.SSLContext | None = None,
        prefix: str = "",
    ) -> None:
        self._listener, self._watch = listener, watch
        self._download: dict[str, int] = {}
        app = Starlette(
            routes=[
                Route("/health/live", self._live),
                Route("/health", self._health),
                Route("/v1/health", self._health),
                Route("/ping", self._health, methods=["GET", "POST"]),
                *web_routes(),
            ],
            exception_handlers={404: self._refuse, 405: self._refuse},
        )
        self._server = HttpServer(PathPrefix(app, prefix), farewell_s=1, tls=tls)
        self._has_read = threading.Event()
        self._thread = threading.Thread(target=self._run, name="loading server", daemon=True)

    def __enter__(self) -> "LoadingServer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_read.set()
        self._server.should_exit = True
        self._thread.join()

    def __call__(self, done: int, total: int) -> None:
        """Record the downloaded bytes and the total bytes of a download."""
        self._download = {"bytes_done": done, "bytes_total": total}
        self._watch.download(done, total)

    def _run(self) -> None:
        if not self._has_read.wait(_SHORT_READ_S):
            with self._listener.dup() as own:
                self._server.run(sockets=[own])

    async def _live(self, request: Request) -> Response:
        return answer({"status": "ok"})

    async def _health(self, request: Request) -> Response:
        more = {"download": self._download} if self._download else {}
        return unhealthy("loading", **more, loading=loading_of(self._watch))

    async def _refuse(self, request: Request, error: Exception) -> Response:
        return refuse(UNAVAILABLE["loading"])
