"""Builds JSON answers and errors, and adds the request id to every answer."""

import asyncio
import contextlib
import logging
import math
import re
import secrets
import time
from collections.abc import Mapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from headrace.gateway.content_coding import ACCEPTED
from headrace.gateway.web_routes import is_from_browser, missing_page
from headrace.generation.request_span import named
from headrace.metrics.metrics import ServerFigures
from headrace.metrics.traces import Attribute, RequestSpan, Traces
from headrace.protocols.dialect import BELOW, ErrorFormat, dialect_at, dialect_of, encode
from headrace.protocols.framing import LINES, SSE
from headrace.protocols.openai import chunks as openai
from headrace.streams.events import Error
from headrace.streams.log import LogGone
from headrace.streams.record import Record
from headrace.streams.store import StoreStalled
from headrace.workers.job_queue import OWNER
from headrace_common.errors import RequestError
from headrace_common.log_context import PARENT, REQUEST_ID, begin_request, log_request

logger = logging.getLogger(__name__)

# Maximum number of bytes of a refused upload that are still read, and the seconds for this read.
_MAX_DRAINED, _DRAINING_S = 1 << 20, 1.0
# Maximum number of fields in a query.
_MAX_FIELDS = 100
_REQUEST_ID = re.compile(r"[\x20-\x7e]{1,128}")


_WITH_PAUSE = (429, 503)
_CLOSING = ("request_too_large", "body_timeout", "server_shutdown")
"""Codes of errors after which the server reads no more from the connection."""

_DEFAULT_PAUSE_S = 1.0
_MODELS, _MESSAGES = "/v1/models", "/v1/messages"


IGNORED = "X-Headrace-Ignored"


def answer(body: dict[str, Any], ignored: tuple[str, ...] = ()) -> Response:
    """Return a JSON answer; `ignored` names the parts of the request that have no effect."""
    headers = {IGNORED: ", ".join(ignored)} if ignored else None
    return Response(encode(body), media_type="application/json", headers=headers)


def live_start(headers: Mapping[str, str]) -> Message:
    """Return the start of a streamed answer, which no proxy may cache or buffer."""
    all_headers = {"cache-control": "no-cache", "x-accel-buffering": "no", **headers}
    raw = [(name.lower().encode(), value.encode("latin-1")) for name, value in all_headers.items()]
    return {"type": "http.response.start", "status": 200, "headers": raw}


def speaks_anthropic(scope: Scope) -> bool:
    """Return whether the client wants the list of models, or one model, in Anthropic's format."""
    is_list = scope["path"] == _MODELS or scope["path"].startswith(f"{_MODELS}/")
    return is_list and "anthropic-version" in Headers(scope=scope)


def refuse(error: RequestError, path: str = "", request_id: str = "") -> Response:
    """Return the answer to a refused request, in the error format of the request's path."""
    kind, errors = error.kind, _errors_at(path)
    headers = retry_headers(error)
    if kind.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if kind.status == 415:
        headers["Accept-Encoding"] = ACCEPTED
    if error.code in _CLOSING:
        headers["Connection"] = "close"
    body = errors.body(error, request_id)
    return Response(body, errors.status(error), headers, "application/json")


def failed_stream_answer(event: Error, record: Record) -> Response:
    """Return the answer to a request whose stream failed before any part of the answer was sent."""
    errors = dialect_of(record.request.route).ERRORS
    headers = _headers(event.status, event.retryable, _DEFAULT_PAUSE_S)
    headers["X-Stream-Id"] = record.id
    body = errors.body(event, REQUEST_ID.get())
    return Response(body, errors.status(event), headers, "application/json")


async def no_such_route(request: Request, error: Exception) -> Response:
    """Answer Starlette's errors 404 and 405 in the format of all other errors."""
    assert isinstance(error, HTTPException)
    scope, path = request.scope, request.url.path
    if error.status_code == 405:
        allowed = ", ".join(_methods_at(scope))
        refusal = RequestError("method_not_allowed", f"This route only accepts {allowed}.")
        response = refuse_path(refusal, scope, path, REQUEST_ID.get())
        response.headers["Allow"] = allowed
        return response
    message = f"This route does not exist; {_instead(request)}."
    refusal = RequestError("route_not_found", message)
    return refuse_path(refusal, scope, path, REQUEST_ID.get())


def refuse_path(error: RequestError, scope: Scope, path: str, request_id: str) -> Response:
    """Return a page to a person who opened a wrong address, and the usual error to a program."""
    if scope["type"] == "http" and is_from_browser(scope):
        return missing_page(scope, error.kind.status, error.message)
    response = refuse(error, path, request_id)
    response.headers["Vary"] = "Accept"
    return response


def _instead(request: Request) -> str:
    """List the routes below an API's root, or say where all routes are listed."""
    root = "/" + request.url.path.split("/")[1]
    if root not in BELOW:
        return "/openapi.json lists all routes"
    found = {route.path for route in request.app.routes if route.path.startswith(f"{root}/")}
    return f"the routes below {root} are {', '.join(sorted(found))}"


async def no_socket(socket: WebSocket) -> None:
    """Refuse a WebSocket on a route without WebSockets, so that the client continues over HTTP."""
    message = "Only /v1/responses and /v1/realtime-text accept a WebSocket."
    refusal = RequestError("method_not_allowed", message)
    response = refuse(refusal, socket.url.path)
    await socket.send_denial_response(response)


def _methods_at(scope: Scope) -> list[str]:
    """Return the methods that the routes of this path accept, in alphabetical order."""
    return sorted({method for route in _routes_at(scope) for method in route.methods or ()})


def _routes_at(scope: Scope) -> list[Route]:
    routes = [route for route in scope["app"].routes if isinstance(route, Route)]
    return [route for route in routes if route.matches(scope)[0] is not Match.NONE]


def _errors_at(path: str) -> ErrorFormat:
    dialect = dialect_at(path)
    return dialect.ERRORS if dialect else openai.ERRORS


def retry_headers(error: RequestError) -> dict[str, str]:
    """Return the headers that say whether and when a client can send a refused request again."""
    return _headers(error.kind.status, error.kind.retry, error.retry_after_s)


def _headers(status: int, retry: bool, pause_s: float) -> dict[str, str]:
    headers = {"x-should-retry": "true" if retry else "false"}
    if status in _WITH_PAUSE:
        headers["Retry-After"] = str(max(1, math.ceil(pause_s)))
        headers["retry-after-ms"] = str(math.ceil(pause_s * 1000))
    return headers


def notice_of(error: Exception) -> RequestError:
    """Return the error for a reader whose answer ends before the stream ends."""
    match error:
        case StoreStalled():
            message = "The store does not respond; continue reading the stream later."
            return RequestError("storage_stalled", message)
        case RequestError():
            return error
        case LogGone():
            return RequestError("stream_not_found", "The stream was deleted.")
    logger.error("A stream could not be rendered", exc_info=error)
    return RequestError(
        "internal_error", "The server failed on this stream; the server's log says why."
    )


class _TrackedSend:
    """Wraps `send` to add the request id to the answer.

    Also counts the answer's frames for the metrics.
    """

    def __init__(
        self, scope: Scope, send: Send, figures: ServerFigures, names: dict[str, str]
    ) -> None:
        self.has_begun = False
        self._requested_at = time.monotonic()
        self._path = scope["path"] if scope["method"] == "GET" else ""
        self._send = send
        self._figures = figures
        self._id_headers = names
        self._is_stream = False
        # The API through which this GET resumes a stream. The value is "" for all other requests,
        # and after the first bytes.
        self._resume_api = ""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.has_begun = True
            headers = MutableHeaders(scope=message)
            headers.update(self._id_headers)
            headers["X-Content-Type-Options"] = "nosniff"
            is_framed = headers.get("content-type", "").startswith(_FRAMED)
            self._is_stream = is_framed and "x-stream-id" in headers
            if self._is_stream:
                apis = (api for start, api in _RESUME_APIS.items() if self._path.startswith(start))
                self._resume_api = next(apis, "")
            if "x-stream-attached" in headers:
                self._figures.attached()
        await self._send(message)
        if self._is_stream and message.get("body"):
            self._figures.frame_sent(self)
            if self._resume_api:
                self._figures.resumed(self._resume_api, time.monotonic() - self._requested_at)
                self._resume_api = ""


_FRAMED = (SSE.MEDIA_TYPE, LINES.MEDIA_TYPE)
_RESUME_APIS = {
    "/v1/streams": "event",
    "/v1/stream": "byte",
    "/v1/durable": "durable",
    "/v1/responses": "response",
}


class ErrorBoundary:
    """ASGI middleware that answers every failure of a request with an error."""

    def __init__(self, app: ASGIApp, figures: ServerFigures, traces: Traces) -> None:
        self._app = app
        self._figures = figures
        self._traces = traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = new_request_id(headers)
        began = time.monotonic()
        begin_request(request_id, _parent(headers))
        # The owner is unknown until the key has been checked.
        OWNER.set("")
        path = _MESSAGES if speaks_anthropic(scope) else scope["path"]
        names = {"X-Request-Id", _errors_at(path).REQUEST_ID}
        sending = _TrackedSend(scope, send, self._figures, dict.fromkeys(names, request_id))
        try:
            _check_query(scope["query_string"])
            await self._app(scope, receive, sending)
        except ClientDisconnect:
            # The client left before the body was complete, so no answer is possible.
            pass
        except RequestError as error:
            self._note(scope, error, time.monotonic() - began)
            is_upload = error.code == "request_too_large"
            last_send = _after_upload(receive, sending) if is_upload else sending
            await refuse(error, path, request_id)(scope, receive, last_send)
        except LogGone as gone:
            await refuse(notice_of(gone), path, request_id)(scope, receive, sending)
        except Exception:
            logger.exception("Request %s failed", request_id)
            if sending.has_begun:
                raise
            failure = RequestError(
                "internal_error", "The server failed on this request; the server's log says why."
            )
            await refuse(failure, path, request_id)(scope, receive, sending)
        finally:
            self._figures.frames_ended(sending)

    def _note(self, scope: Scope, error: RequestError, seconds: float) -> None:
        self._figures.refused(error)
        # Use the path of the route, since a client's path can contain any text.
        route = next((r.path for r in _routes_at(scope) if r.matches(scope)[0] is Match.FULL), "")
        log_request(route, error.code, status=error.kind.status, **error.noted)
        if self._traces.is_on and route:
            outcome: dict[str, Attribute] = {"error.type": error.code}
            outcome["http.response.status_code"] = error.kind.status
            name = f"{scope['method']} {route}"
            attributes = named(route) | outcome
            self._traces.ended(RequestSpan(name, PARENT.get(), seconds, error.code, attributes))


def _check_query(query: bytes) -> None:
    """Refuse a query with too many fields before the event loop parses the query."""
    num_fields = query.count(b"&") + 1
    if num_fields > _MAX_FIELDS:
        message = f"The query has {num_fields:,} fields; the limit is {_MAX_FIELDS}. Send fewer."
        raise RequestError("invalid_value", message)


def _parent(headers: Headers) -> dict[str, str]:
    """Return the headers of W3C's trace context that identify the client's span."""
    return {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}


def _after_upload(receive: Receive, send: Send) -> Send:
    """Wrap `send` so that the answer ends only after the rest of the upload has been read.

    The system resets a connection that is closed with unread bytes, and the client may lose the
    answer. At most `_MAX_DRAINED` bytes are read, for at most `_DRAINING_S` seconds.
    """

    async def drain() -> None:
        num_drained, is_whole = 0, False
        while not is_whole and num_drained < _MAX_DRAINED:
            message = await receive()
            num_drained += len(message.get("body", b""))
            is_whole = not message.get("more_body", False)

    async def send_last(message: Message) -> None:
        if message["type"] == "http.response.body":
            await send({**message, "more_body": True})
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(drain(), _DRAINING_S)
            message = {**message, "body": b""}
        await send(message)

    return send_last


def new_request_id(headers: Headers) -> str:
    """Return the request id from the client if the id is short and printable, else a new id."""
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
