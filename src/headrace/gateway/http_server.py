"""uvicorn, as our processes run it: without signal handlers, and with a bound on connections."""

import asyncio
import contextlib
import resource
import socket
import sys
import threading
from collections.abc import Callable, Iterator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from headrace.gateway.answers import answer, refuse
from headrace.gateway.state_routes import UNABLE, unhealthy

MAX_AHEAD, _MAX_AHEAD_BYTES = 16, 64 << 10  # requests sent before the answer to an earlier one
_KEPT_BACK = 64  # descriptors for all else: engine, store, worker processes, files


class HttpServer(uvicorn.Server):
    """Whoever starts it decides when it ends."""

    def __init__(self, app: ASGIApp, keep_alive_s: int = 5, farewell_s: int | None = None) -> None:
        config = uvicorn.Config(
            app,
            http=_Connection,
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_keep_alive=keep_alive_s,
            timeout_graceful_shutdown=farewell_s,
            server_header=False,
        )
        super().__init__(config)
        self.server_state = _Clients()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Clients(ServerState):
    """All connections, and those among them that ask for nothing, the longest idle first."""

    def __init__(self) -> None:
        super().__init__()
        self.idle: dict[HttpToolsProtocol, None] = {}

    def make_room(self, newest: HttpToolsProtocol) -> None:
        """Where descriptors run out the longest idle one is cut, or the newest if all are busy."""
        if len(self.connections) > _max_connections():
            victim = next(iter(self.idle), newest)
            self.idle.pop(victim, None)
            victim.transport.abort()


class _Connection(HttpToolsProtocol):
    """Hears of a client's leaving also while requests wait behind the running one."""

    server_state: _Clients
    _running: RequestResponseCycle | None = None
    _is_full = False  # nothing more is taken from this client

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.server_state.idle[self] = None
        self.server_state.make_room(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.server_state.idle.pop(self, None)
        self.pipeline.clear()
        if self._running and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def data_received(self, data: bytes) -> None:
        if self._is_full:
            return
        super().data_received(data)
        if self.pipeline:
            self._bound_pipeline()
            self.flow.resume_reading()  # only who reads hears the end of a connection

    def on_headers_complete(self) -> None:
        self.server_state.idle.pop(self, None)
        super().on_headers_complete()
        if not self.pipeline:
            self._running = self.cycle

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._running = self.pipeline[-1][0]
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            self.server_state.idle[self] = None

    def _bound_pipeline(self) -> None:
        """Beyond the bound the running request is the last: the client sends the others again."""
        num_bytes = sum(len(cycle.body) for cycle, _ in self.pipeline)
        if self._running and (len(self.pipeline) > MAX_AHEAD or num_bytes > _MAX_AHEAD_BYTES):
            self._is_full = True
            self.pipeline.clear()
            self.cycle = self._running
            self.cycle.keep_alive = False


def _max_connections() -> int:
    """What the limit on descriptors leaves; it may change while we run."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    return max(limit - _KEPT_BACK, limit // 2)


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
