"""uvicorn, as our processes run it: without signal handlers, and with bounds.

Bounded are connections, heads of requests in size and time, what is sent ahead, and the time in
which a client takes nothing of its answer.
"""

import asyncio
import contextlib
import http
import resource
import socket
import ssl
from collections.abc import Iterator
from typing import Any, NamedTuple

import uvicorn
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState

from headrace.gateway.http_responses import new_request_id, refuse
from headrace.gateway.realtime import GOING_AWAY
from headrace_common.errors import RequestError
from headrace_common.system.awake import Countdown

MAX_AHEAD, _MAX_AHEAD_BYTES = 16, 64 << 10  # requests sent before the answer to an earlier one
PING_S, PONG_S = 15.0, 45.0  # of a WebSocket
_KEPT_BACK = 64  # descriptors for all else: engine, store, worker processes, files
DESCRIPTORS_BESIDE = 256  # connections
MAX_HEAD = 64 << 10  # bytes of a request line with its headers
TAKES_NOTHING_S = 60.0  # after this long without a byte taken, a client is gone
_LINGER_S, _LINGER_BYTES = 5.0, 64 << 20  # read and discarded before a connection is closed


class Bounds(NamedTuple):
    """The limits that people may set."""

    connections: int = 4096
    head_s: float = 10.0  # for a request line and all headers to come


class HttpServer(uvicorn.Server):
    """The HTTP server; its starter decides when it ends."""

    def __init__(
        self,
        app: ASGIApp,
        keep_alive_s: int = 5,
        farewell_s: int | None = None,
        tls: ssl.SSLContext | None = None,
        max_message_bytes: int = 1 << 20,
        bounds: Bounds = Bounds(),  # noqa: B008, for it is a constant
    ) -> None:
        config = uvicorn.Config(
            app,
            interface="asgi3",  # uvicorn would guess ASGI 2 for an app without `async def`
            http=_Connection,
            ws=_Socket,
            ws_max_size=max_message_bytes,
            ws_ping_interval=PING_S,
            ws_ping_timeout=PONG_S,
            ws_per_message_deflate=False,  # text of one client must not cost the loop its time
            log_config=None,  # uvicorn's own would close the handlers that there are
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_keep_alive=keep_alive_s,
            timeout_graceful_shutdown=farewell_s,
            server_header=False,
        )
        config.load()
        config.ssl = tls
        super().__init__(config)
        self.server_state = _Clients(bounds)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Clients(ServerState):
    """All connections, and those among them that ask for nothing, the longest idle first."""

    def __init__(self, bounds: Bounds) -> None:
        super().__init__()
        self.bounds = bounds
        self.idle: dict[HttpToolsProtocol, None] = {}

    def make_room(self, newest: HttpToolsProtocol) -> None:
        """Cuts the longest idle one where descriptors run out, or the newest if all are busy."""
        if len(self.connections) > _max_connections(self.bounds.connections):
            victim = next(iter(self.idle), newest)
            self.idle.pop(victim, None)
            victim.transport.abort()


_PROBES_S = (0.1, 1.0, 15.0)
"""Waits between interim responses; the system reports a client that has left at the second one."""
_HTTP_1_0_WAIT_S = 1.0


class _Connection(HttpToolsProtocol):
    """Hears of a client's leaving also while requests wait behind the running one."""

    server_state: _Clients
    _running: RequestResponseCycle | None = None
    _is_full = False  # nothing more is taken from this client
    _head_bytes: int | None = 0  # of the request that is being read; None once its head is whole
    _refusal: RequestError | None = None
    _head_timer: Countdown | None = None
    _taking_timer: Countdown | None = None
    _probe: asyncio.TimerHandle | None = None  # set once the client has closed its sending side
    _linger_timer: Countdown | None = None  # set once the last answer is sent
    _lingers_for = _LINGER_BYTES

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._drop_if_it_takes_nothing()
        self._time_head()
        self.server_state.idle[self] = None
        self.server_state.make_room(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.server_state.idle.pop(self, None)
        self.pipeline.clear()
        for timer in (self._head_timer, self._taking_timer, self._probe, self._linger_timer):
            if timer is not None:
                timer.cancel()
        if self._running and not self._running.response_complete:
            self._hear_that_it_left(self._running)

    def data_received(self, data: bytes) -> None:
        if self._is_full:
            self._discard(data)
            return
        if self._head_bytes is not None:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes is not None and self._head_bytes > MAX_HEAD:
            self._refuse_head(_TOO_LONG)
        if self.pipeline:
            self._bound_pipeline()
            self.flow.resume_reading()  # only who reads hears the end of a connection

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether a client that has closed its sending side can still be answered.

        A client that has closed only its sending side (`nc -N`) waits for its answer. A client
        that has left looks the same until something is sent to it, so the server sends interim
        responses, which HTTP/1.1 allows. TLS has no half-closed connections.
        """
        running = self._running
        if running is None or running.more_body or running.response_started or self.pipeline:
            return False
        if self.transport.get_extra_info("sslcontext") is not None:
            return False
        running.keep_alive = False
        if self._probe is None:
            self._probe_client(running, _PROBES_S)
        return True

    def _probe_client(self, running: RequestResponseCycle, delays_s: tuple[float, ...]) -> None:
        if running.response_started or self.transport.is_closing():
            return
        if running.scope["http_version"] == "1.0":
            # HTTP/1.0 has no interim responses: only a quick answer reaches such a client.
            self._probe = self.loop.call_later(_HTTP_1_0_WAIT_S, self._close_if_waiting, running)
            return
        self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        delay_s, later = delays_s[0], delays_s[1:] or delays_s
        self._probe = self.loop.call_later(delay_s, self._probe_client, running, later)

    def _close_if_waiting(self, running: RequestResponseCycle) -> None:
        if not running.response_started:
            self.transport.close()

    # what the parser calls

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = self._head_bytes or 1
        self._time_head()

    def on_headers_complete(self) -> None:
        self._stop_timing_head()
        self._head_bytes = None
        if self.parser.get_http_version() not in ("1.1", "1.0"):
            raise _NO_HTTP.with_traceback(None)  # the parser stops, and send_400_response is next
        if len(self.url) + sum([len(k) + len(v) + 4 for k, v in self.headers]) > MAX_HEAD:
            self._refusal = _TOO_LONG
            raise _TOO_LONG.with_traceback(None)
        self.server_state.idle.pop(self, None)
        super().on_headers_complete()
        if not self.pipeline:
            self._running = self.cycle

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        cycle.transport = _LingeringTransport(self, cycle)  # type: ignore[assignment]
        if cycle.scope["http_version"] == "1.0":
            app = _EndedByClosing(app, cycle)
        super()._start_asgi_task(cycle, app)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._head_bytes = 0

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._running = self.pipeline[-1][0]
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            self.server_state.idle[self] = None
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            patience = Countdown(self.timeout_keep_alive, self.timeout_keep_alive_handler)
            self.timeout_keep_alive_task = patience  # type: ignore[assignment]

    # requests that are none

    def send_400_response(self, msg: str) -> None:
        """Answers a request that the parser refused with an error like all others."""
        self._refuse_head(self._refusal or _NO_HTTP)

    def _refuse_head(self, error: RequestError) -> None:
        """Answers what cannot be read, and closes; behind a request that runs, only closes."""
        if self._linger_timer is not None:
            return
        self._is_full = True
        self._stop_timing_head()
        running = self._running
        if running is not None and not running.response_complete:
            if not running.more_body or running.response_started:
                self._end_with(running)
                return
            self._hear_that_it_left(running)  # its body broke off
        request_id = new_request_id(Headers(raw=getattr(self, "headers", None) or []))
        response = refuse(error, "", request_id)
        response.headers["X-Request-Id"] = request_id
        response.headers["Connection"] = "close"
        status = response.status_code
        head = f"HTTP/1.1 {status} {http.HTTPStatus(status).phrase}\r\n".encode()
        lines = [name + b": " + value + b"\r\n" for name, value in response.raw_headers]
        self.transport.write(b"".join([head, *lines, b"\r\n", bytes(response.body)]))
        self.linger()

    def linger(self) -> None:
        """Closes the connection once the client has stopped sending, or has sent for too long.

        The system answers bytes that nobody reads with a reset, and a client that receives one
        loses the answer that it has not yet read.
        """
        self._is_full = True
        if self._linger_timer is not None or self.transport.is_closing():
            return
        if self.transport.can_write_eof():  # not with TLS
            self.transport.write_eof()
        self._linger_timer = Countdown(_LINGER_S, self.transport.close)
        self.flow.resume_reading()

    def _discard(self, data: bytes) -> None:
        if self._linger_timer is not None:
            self._lingers_for -= len(data)
            if self._lingers_for < 0:
                self.transport.close()

    def _end_with(self, running: RequestResponseCycle) -> None:
        """The running request is the last one; the client sends the others again."""
        self._is_full = True
        self.pipeline.clear()
        self.cycle = running
        running.keep_alive = False

    def _hear_that_it_left(self, running: RequestResponseCycle) -> None:
        running.disconnected = True
        running.message_event.set()

    def _time_head(self) -> None:
        self._stop_timing_head()
        self._head_timer = Countdown(self.server_state.bounds.head_s, self._head_is_late)

    def _stop_timing_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _head_is_late(self) -> None:
        if self._head_bytes:
            self._refuse_head(_too_slow(self.server_state.bounds.head_s))
        else:
            self.transport.close()  # it asked for nothing

    # clients that take nothing

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_taking(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._taking_timer is not None:
            self._taking_timer.cancel()
            self._taking_timer = None

    def _watch_taking(self, num_bytes: int) -> None:
        """Nothing is written meanwhile, so the buffer grows smaller unless nothing is taken."""

        def check_taken() -> None:
            if (left := self.transport.get_write_buffer_size()) < num_bytes:
                self._watch_taking(left)
            else:
                self.transport.abort()

        self._taking_timer = Countdown(TAKES_NOTHING_S, check_taken)

    def _drop_if_it_takes_nothing(self) -> None:
        """The same by the system, for an answer that is too small to fill our buffer."""
        sock = self.transport.get_extra_info("socket")
        with contextlib.suppress(OSError, AttributeError):  # not Linux, or not TCP
            sock.setsockopt(
                socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * TAKES_NOTHING_S)
            )

    def _bound_pipeline(self) -> None:
        """Beyond the bound the running request is the last."""
        num_bytes = sum(len(cycle.body) for cycle, _ in self.pipeline)
        if self._running and (len(self.pipeline) > MAX_AHEAD or num_bytes > _MAX_AHEAD_BYTES):
            self._end_with(self._running)


class _LingeringTransport:
    """The methods of a transport that uvicorn calls for a request; `close` lingers if need be."""

    __slots__ = ("_connection", "_cycle", "is_closing", "write")

    def __init__(self, connection: _Connection, cycle: RequestResponseCycle) -> None:
        self._connection, self._cycle = connection, cycle
        self.write = connection.transport.write
        self.is_closing = connection.transport.is_closing

    def close(self) -> None:
        if self._cycle.more_body and self._cycle.response_complete:
            self._connection.linger()
        else:
            self._connection.transport.close()


class _EndedByClosing:
    """ASGI middleware for HTTP/1.0 clients, which do not know chunked answers.

    An answer without a length ends where its connection does.
    """

    def __init__(self, app: ASGIApp, cycle: RequestResponseCycle) -> None:
        self._app = app
        self._cycle = cycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_length = True

        async def send_plainly(message: Message) -> None:
            nonlocal has_length
            if message["type"] == "http.response.start":
                has_length = "content-length" in Headers(raw=message["headers"])
            if not has_length:  # what uvicorn checks of an answer with a length, made true here
                self._cycle.chunked_encoding = False
                self._cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await self._app(scope, receive, send_plainly)


_NO_HTTP = RequestError("invalid_http", "This is no HTTP/1.1 request that can be read.")
_TOO_LONG = RequestError(
    "headers_too_large",
    f"The request line and headers are longer than {MAX_HEAD} bytes; send less.",
)


def _too_slow(head_s: float) -> RequestError:
    message = f"The headers were not whole within {head_s:g} s; send the request again."
    return RequestError("headers_timeout", message)


class _Socket(WebSocketsSansIOProtocol):
    """Says why it closes, and does not wait for a client that takes nothing."""

    def shutdown(self) -> None:
        if self.handshake_complete and not (self.close_sent or self.disconnected):
            # its streams have last words; then the application closes it
            self.queue.put_nowait({"type": "websocket.disconnect", "code": GOING_AWAY})
        else:
            super().shutdown()

    def send_keepalive_ping(self) -> None:
        super().send_keepalive_ping()
        if self.pong_timer is not None:
            self.pong_timer.cancel()
            self.pong_timer = Countdown(PONG_S, self.keepalive_timeout)  # type: ignore[assignment]

    def keepalive_timeout(self) -> None:
        super().keepalive_timeout()
        self.transport.abort()


def raise_descriptors(connections: int) -> None:
    """Takes as many descriptors as connections want, if the system lets this process have them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = connections + DESCRIPTORS_BESIDE
    wanted = most if hard == resource.RLIM_INFINITY else min(most, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _max_connections(most: int) -> int:
    """The connections that the limit on descriptors leaves; it may change while we run."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return most
    return min(max(limit - _KEPT_BACK, limit // 2), most)
