"""Runs uvicorn without signal handlers, and limits the resources that one client can use.

Limits apply to connections, to the size and time of a request's head, and to pipelined requests.
A client that reads nothing of its answer is disconnected after a while.
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
from uvicorn.server import ServerState

from headrace.gateway.http_responses import new_request_id, refuse
from headrace.gateway.web_socket import PING_S, PONG_S, SocketProtocol, UnreadMessages
from headrace_common.errors import RequestError
from headrace_common.system.awake import Countdown

# Maximum number of pipelined requests that wait for an earlier answer, and maximum number of
# bytes of these requests.
MAX_AHEAD, _MAX_AHEAD_BYTES = 16, 64 << 10
# Descriptors that are reserved for the engine, the store, worker processes and files.
_RESERVED_DESCRIPTORS = 64
# Number of descriptors that the server needs besides those of connections.
OTHER_DESCRIPTORS = 256
# Maximum number of bytes in a request line and its headers.
MAX_HEAD = 64 << 10
# Seconds after which a client that reads nothing of its answer is disconnected.
STALLED_S = 60.0
# Maximum number of seconds and of bytes to read and discard before a connection is closed.
_LINGER_S, _LINGER_BYTES = 5.0, 64 << 20


class Bounds(NamedTuple):
    """Limits that the operator can set."""

    connections: int = 4096
    head_s: float = 10.0  # seconds, for a request line and its headers


class HttpServer(uvicorn.Server):
    """An HTTP server that ignores signals; the code that started the server also ends it."""

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
            # uvicorn would guess ASGI 2 for an application that is not an `async def` function.
            interface="asgi3",
            http=_Connection,
            ws=SocketProtocol,
            ws_max_size=max_message_bytes,
            ws_ping_interval=PING_S,
            ws_ping_timeout=PONG_S,
            # Compressing one client's text would take the event loop's time from other clients.
            ws_per_message_deflate=False,
            # The logging configuration of uvicorn would close the existing handlers.
            log_config=None,
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
        self.server_state = _Clients(bounds, max_message_bytes)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Clients(ServerState):
    """Tracks all connections, and the idle connections in order: the longest idle one is first."""

    def __init__(self, bounds: Bounds, max_message_bytes: int) -> None:
        super().__init__()
        self.bounds = bounds
        self.unread_messages = UnreadMessages(max_message_bytes)
        self.idle: dict[HttpToolsProtocol, None] = {}

    def make_room(self, newest: HttpToolsProtocol) -> None:
        """Close a connection if there are more than --max-connections or the descriptors allow.

        Closes the connection that has been idle longest. If all connections are busy, closes the
        newest connection.
        """
        if len(self.connections) > _max_connections(self.bounds.connections):
            victim = next(iter(self.idle), newest)
            self.idle.pop(victim, None)
            victim.transport.abort()


_PROBES_S = (0.1, 1.0, 15.0)
"""Seconds between interim responses. The second response fails if the client has left."""
_HTTP_1_0_WAIT_S = 1.0


class _Connection(HttpToolsProtocol):
    """Limits one connection, and notices that the client leaves even while requests wait.

    A connection is idle until a head arrives. The head must be complete within a time and a size
    limit. Then the request runs. Pipelined requests wait in uvicorn's `pipeline`. While a request
    runs, the connection continues to read, because only a transport that reads notices that the
    client has left.

    If a request cannot be read, the connection answers with an error and then lingers. A
    lingering connection reads and discards all input, so that the client can read the answer
    before the connection closes.
    """

    server_state: _Clients
    _running: RequestResponseCycle | None = None
    # True once all further input from this client is discarded.
    _ignores_input = False
    # Number of bytes of the incomplete head; None once the head is complete.
    _head_bytes: int | None = 0
    _refusal: RequestError | None = None
    _head_timer: Countdown | None = None
    _stall_timer: Countdown | None = None
    # Set once the client has closed its side of the connection for sending.
    _probe: asyncio.TimerHandle | None = None
    # Set once the last answer has been sent.
    _linger_timer: Countdown | None = None
    _linger_bytes_left = _LINGER_BYTES

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._let_system_drop_stalled()
        self._time_head()
        self.server_state.idle[self] = None
        self.server_state.make_room(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.server_state.idle.pop(self, None)
        self.pipeline.clear()
        for timer in (self._head_timer, self._stall_timer, self._probe, self._linger_timer):
            if timer is not None:
                timer.cancel()
        if self._running and not self._running.response_complete:
            self._mark_disconnected(self._running)

    def data_received(self, data: bytes) -> None:
        if self._ignores_input:
            self._discard(data)
            return
        if self._head_bytes is not None:
            self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes is not None and self._head_bytes > MAX_HEAD:
            self._refuse_head(_TOO_LONG)
        if self.pipeline:
            self._bound_pipeline()
            # Only a transport that reads notices the end of a connection.
            self.flow.resume_reading()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return whether a client that has closed its sending side can still get an answer.

        A client that has closed only its sending side (`nc -N`) waits for the answer. A client that
        has left looks the same until the server sends data. So the server sends interim responses,
        which HTTP/1.1 allows. TLS has no half-closed connections.
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
            # HTTP/1.0 has no interim responses. So only a quick answer reaches such a client.
            self._probe = self.loop.call_later(_HTTP_1_0_WAIT_S, self._close_if_waiting, running)
            return
        self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        delay_s, later = delays_s[0], delays_s[1:] or delays_s
        self._probe = self.loop.call_later(delay_s, self._probe_client, running, later)

    def _close_if_waiting(self, running: RequestResponseCycle) -> None:
        if not running.response_started:
            self.transport.close()

    # Methods that the parser calls:

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_bytes = self._head_bytes or 1
        self._time_head()

    def on_headers_complete(self) -> None:
        self._stop_timing_head()
        self._head_bytes = None
        if self.parser.get_http_version() not in ("1.1", "1.0"):
            # This exception stops the parser, and uvicorn then calls send_400_response.
            raise _NO_HTTP.with_traceback(None)
        if len(self.url) + sum([len(k) + len(v) + 4 for k, v in self.headers]) > MAX_HEAD:
            self._refusal = _TOO_LONG
            raise _TOO_LONG.with_traceback(None)
        if len(self.pipeline) > MAX_AHEAD:
            # Stop the parser, because one read can contain thousands of requests. `_refuse_head`
            # then makes the running request the last one.
            raise _NO_HTTP.with_traceback(None)
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

    # Handling of requests that cannot be read:

    def send_400_response(self, msg: str) -> None:
        """Send an error in the usual format for a request that the parser refused."""
        self._refuse_head(self._refusal or _NO_HTTP)

    def _refuse_head(self, error: RequestError) -> None:
        """Answer a request that cannot be read, then close the connection.

        If an earlier request is still running, the connection closes after the answer to the
        earlier request, and no error is sent.
        """
        if self._linger_timer is not None:
            return
        self._ignores_input = True
        self._stop_timing_head()
        running = self._running
        if running is not None and not running.response_complete:
            if not running.more_body or running.response_started:
                self._make_last(running)
                return
            # The malformed bytes belong to the body of the running request.
            self._mark_disconnected(running)
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
        """Close the connection once the client has stopped sending or has sent too much.

        If the server closed the connection with unread bytes, the system would send a reset. A
        client that receives a reset loses the unread part of its answer.
        """
        self._ignores_input = True
        if self._linger_timer is not None or self.transport.is_closing():
            return
        # A TLS connection cannot close its sending side alone.
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._linger_timer = Countdown(_LINGER_S, self.transport.close)
        self.flow.resume_reading()

    def _discard(self, data: bytes) -> None:
        if self._linger_timer is not None:
            self._linger_bytes_left -= len(data)
            if self._linger_bytes_left < 0:
                self.transport.close()

    def _make_last(self, running: RequestResponseCycle) -> None:
        """Make the running request the last one.

        The client has to send later requests again.
        """
        self._ignores_input = True
        self.pipeline.clear()
        self.cycle = running
        running.keep_alive = False

    def _mark_disconnected(self, running: RequestResponseCycle) -> None:
        running.disconnected = True
        running.message_event.set()

    def _time_head(self) -> None:
        self._stop_timing_head()
        self._head_timer = Countdown(self.server_state.bounds.head_s, self._time_out_head)

    def _stop_timing_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _time_out_head(self) -> None:
        if self._head_bytes:
            self._refuse_head(_too_slow(self.server_state.bounds.head_s))
        else:
            # The client has not sent a request, so the connection closes without an answer.
            self.transport.close()

    # Handling of clients that read nothing of their answer:

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reading(self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _watch_reading(self, num_bytes: int) -> None:
        """Abort the connection if the client reads nothing for a while.

        During this time the server writes nothing, so the buffer shrinks unless the client reads
        nothing.
        """

        def check_read() -> None:
            if (left := self.transport.get_write_buffer_size()) < num_bytes:
                self._watch_reading(left)
            else:
                self.transport.abort()

        self._stall_timer = Countdown(STALLED_S, check_read)

    def _let_system_drop_stalled(self) -> None:
        """Let the system drop a client that reads nothing of a short answer.

        An answer that does not fill the write buffer never calls `pause_writing`.
        """
        sock = self.transport.get_extra_info("socket")
        # Setting the option fails on systems other than Linux, and on connections other than TCP.
        with contextlib.suppress(OSError, AttributeError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * STALLED_S))

    def _bound_pipeline(self) -> None:
        """Close the connection after the running request if too many requests or bytes wait."""
        num_bytes = sum(len(cycle.body) for cycle, _ in self.pipeline)
        if self._running and (len(self.pipeline) > MAX_AHEAD or num_bytes > _MAX_AHEAD_BYTES):
            self._make_last(self._running)


class _LingeringTransport:
    """Wraps a transport for uvicorn.

    After a refused upload, `close` makes the connection linger.
    """

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
    """ASGI middleware for HTTP/1.0 clients, which cannot read chunked answers.

    An answer without a length ends when the connection closes.
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
            # uvicorn checks that an answer has the announced length. This answer has no announced
            # length, so the expected length is set to the length of this message.
            if not has_length:
                self._cycle.chunked_encoding = False
                self._cycle.expected_content_length = len(message.get("body", b""))
            await send(message)

        await self._app(scope, receive, send_plainly)


_NO_HTTP = RequestError("invalid_http", "The request is not valid HTTP/1.1.")
_TOO_LONG = RequestError(
    "headers_too_large",
    f"The request line and headers exceed {MAX_HEAD:,} bytes; shorten them.",
)


def _too_slow(head_s: float) -> RequestError:
    message = f"The headers were incomplete after {head_s:g} s; send the request again."
    return RequestError("headers_timeout", message)


def raise_descriptors(connections: int) -> None:
    """Raise the limit on descriptors to what the connections need.

    If the system's hard limit is lower, raise the limit to the hard limit.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = connections + OTHER_DESCRIPTORS
    wanted = most if hard == resource.RLIM_INFINITY else min(most, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _max_connections(most: int) -> int:
    """Return the number of connections that the current limit on descriptors allows."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return most
    return min(max(limit - _RESERVED_DESCRIPTORS, limit // 2), most)
