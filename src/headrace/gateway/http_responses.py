"""Answers of one JSON body, and what every answer has: a request id, an error where code failed."""

import asyncio
import contextlib
import logging
import math
import re
import secrets
import time
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket

from headrace.gateway.content_coding import ACCEPTED
from headrace.generation.request_span import named
from headrace.metrics.metrics import ServerFigures
from headrace.metrics.traces import Attribute, RequestSpan, Traces
from headrace.protocols.dialect import BELOW, ErrorFormat, dialect_of, encode, spoken_at
from headrace.protocols.framing import LINES, SSE
from headrace.protocols.openai import chunks as openai
from headrace.streams.events import Error
from headrace.streams.log import LogGone
from headrace.streams.record import Record
from headrace.streams.store import StoreStalled
from headrace.workers.job_line import OWNER
from headrace_common.errors import RequestError
from headrace_common.log_context import PARENT, begin_request, log_request

logger = logging.getLogger(__name__)

_MAX_TAKEN, _TAKING_S = 1 << 20, 1.0  # of an upload that was refused
_MAX_FIELDS = 100  # of a query
_REQUEST_ID = re.compile(r"[\x20-\x7e]{1,128}")


_WITH_PAUSE = (429, 503)
_CLOSING = ("request_too_large", "body_timeout", "server_shutdown")
"""After these nothing more is read from the connection."""

_DEFAULT_PAUSE_S = 1.0
_MODELS, _MESSAGES = "/v1/models", "/v1/messages"
_ID_KEY = "headrace.request_id"  # in a scope


IGNORED = "X-Headrace-Ignored"


def answer(body: dict[str, Any], ignored: tuple[str, ...] = ()) -> Response:
    """Return a body of JSON; `ignored` names what of the request has no effect."""
    headers = {IGNORED: ", ".join(ignored)} if ignored else None
    return Response(encode(body), media_type="application/json", headers=headers)


def request_id_of(scope: Scope) -> str:
    """The id that ErrorBoundary gave the request."""
    return str(scope.get(_ID_KEY, ""))


def speaks_anthropic(scope: Scope) -> bool:
    """Whether a client asks for the list of models, or one of them, in Anthropic's shape."""
    is_list = scope["path"] == _MODELS or scope["path"].startswith(f"{_MODELS}/")
    return is_list and "anthropic-version" in Headers(scope=scope)


def refuse(error: RequestError, path: str = "", request_id: str = "") -> Response:
    """The answer to a request that was not admitted, in the dialect of its path."""
    kind, errors = error.kind, _errors_at(path)
    headers = _headers(kind.status, kind.retry, error.retry_after_s)
    if kind.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if kind.status == 415:
        headers["Accept-Encoding"] = ACCEPTED
    if error.code in _CLOSING:
        headers["Connection"] = "close"
    body = errors.body(error, request_id)
    return Response(body, errors.status(error), headers, "application/json")


def cut(event: Error, record: Record, request_id: str) -> Response:
    """The answer to a request whose stream was cut before any of it was sent."""
    errors = dialect_of(record.request.route).ERRORS
    headers = _headers(event.status, event.retryable, _DEFAULT_PAUSE_S)
    headers["X-Stream-Id"] = record.id
    body = errors.body(event, request_id)
    return Response(body, errors.status(event), headers, "application/json")


async def no_such_route(request: Request, error: Exception) -> Response:
    """Starlette's 404 and 405 in the shape of all other errors."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allowed = ", ".join(_methods_at(request.scope))
        refusal = RequestError("method_not_allowed", f"This route takes {allowed} only.")
        response = refuse(refusal, request.url.path, request_id_of(request.scope))
        response.headers["Allow"] = allowed
        return response
    message = f"There is no such route; {_instead(request)}."
    refusal = RequestError("route_not_found", message)
    return refuse(refusal, request.url.path, request_id_of(request.scope))


def _instead(request: Request) -> str:
    """The routes there are, where a path shows which API its client speaks."""
    root = "/" + request.url.path.split("/")[1]
    if root not in BELOW:
        return "/openapi.json lists those there are"
    found = {route.path for route in request.app.routes if route.path.startswith(f"{root}/")}
    return f"below {root} there is {', '.join(sorted(found))}"


async def no_socket(socket: WebSocket) -> None:
    """The same for a WebSocket, where no route takes one: clients go on without."""
    refusal = RequestError("method_not_allowed", "Only /v1/realtime-text takes a WebSocket.")
    response = refuse(refusal, socket.url.path, request_id_of(socket.scope))
    await socket.send_denial_response(response)


def _methods_at(scope: Scope) -> list[str]:
    """The methods that the routes of this path take, in alphabetic order."""
    return sorted({method for route in _routes_at(scope) for method in route.methods or ()})


def _routes_at(scope: Scope) -> list[Route]:
    routes = [route for route in scope["app"].routes if isinstance(route, Route)]
    return [route for route in routes if route.matches(scope)[0] is not Match.NONE]


def _errors_at(path: str) -> ErrorFormat:
    dialect = spoken_at(path)
    return dialect.ERRORS if dialect else openai.ERRORS


def _headers(status: int, retry: bool, pause_s: float) -> dict[str, str]:
    headers = {"x-should-retry": "true" if retry else "false"}
    if status in _WITH_PAUSE:
        headers["Retry-After"] = str(max(1, math.ceil(pause_s)))
        headers["retry-after-ms"] = str(math.ceil(pause_s * 1000))
    return headers


def notice_of(error: Exception) -> RequestError:
    """The error a reader gets where its answer ends before its stream does."""
    match error:
        case StoreStalled():
            return RequestError("storage_stalled", "The stream cannot be read now; read on later.")
        case RequestError():
            return error
        case LogGone():
            return RequestError("stream_not_found", "The stream was deleted.")
    logger.error("A stream could not be rendered", exc_info=error)
    return RequestError("internal_error", "The server failed on this stream.")


class _Sending:
    """The way of one answer to its client: it gets its id, and the figures hear of its frames."""

    def __init__(
        self, scope: Scope, send: Send, figures: ServerFigures, names: dict[str, str]
    ) -> None:
        self.has_begun = False
        self._asked_at = time.monotonic()
        self._path = scope["path"] if scope["method"] == "GET" else ""
        self._send = send
        self._figures = figures
        self._names = names
        self._is_stream = False
        self._face = ""  # by which a stream is read on, until its first byte has left

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.has_begun = True
            headers = MutableHeaders(scope=message)
            headers.update(self._names)
            headers["X-Content-Type-Options"] = "nosniff"
            self._note_kind(headers)
        await self._send(message)
        if self._is_stream and message.get("body"):
            self._figures.frame_left(self)
            if self._face:
                self._figures.resumed(self._face, time.monotonic() - self._asked_at)
                self._face = ""

    def close(self) -> None:
        self._figures.frames_ended(self)

    def _note_kind(self, headers: Headers) -> None:
        is_framed = headers.get("content-type", "").startswith(_FRAMED)
        self._is_stream = is_framed and "x-stream-id" in headers
        if self._is_stream:
            faces = (face for start, face in _FACES.items() if self._path.startswith(start))
            self._face = next(faces, "")
        if "x-stream-attached" in headers:
            self._figures.attached()


_FRAMED = (SSE.MEDIA_TYPE, LINES.MEDIA_TYPE)
_FACES = {
    "/v1/streams": "event",
    "/v1/stream": "byte",
    "/v1/durable": "durable",
    "/v1/responses": "response",
}


class ErrorBoundary:
    """ASGI middleware; the outermost loop of a request, so nothing passes it."""

    def __init__(self, app: ASGIApp, figures: ServerFigures, traces: Traces) -> None:
        self._app = app
        self._figures = figures
        self._traces = traces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = new_request_id(Headers(scope=scope))
        began = time.monotonic()
        begin_request(request_id, _parent(Headers(scope=scope)))
        OWNER.set("")  # until the key is known
        path = _MESSAGES if speaks_anthropic(scope) else scope["path"]
        names = {"X-Request-Id", _errors_at(path).REQUEST_ID}
        scope = {**scope, _ID_KEY: request_id}
        sending = _Sending(scope, send, self._figures, dict.fromkeys(names, request_id))
        try:
            _check_query(scope["query_string"])
            await self._app(scope, receive, sending)
        except ClientDisconnect:
            pass  # left before the body was whole: there is nobody to answer
        except RequestError as error:
            self._note(scope, error, time.monotonic() - began)
            is_upload = error.code == "request_too_large"
            last_send = _once_taken(receive, sending) if is_upload else sending
            await refuse(error, path, request_id)(scope, receive, last_send)
        except LogGone as gone:
            await refuse(notice_of(gone), path, request_id)(scope, receive, sending)
        except Exception:
            logger.exception("Request %s failed", request_id)
            if sending.has_begun:
                raise
            failure = RequestError("internal_error", "The server failed on this request.")
            await refuse(failure, path, request_id)(scope, receive, sending)
        finally:
            sending.close()

    def _note(self, scope: Scope, error: RequestError, seconds: float) -> None:
        self._figures.refused(error)
        # the route's path, since a client's own may be anything
        route = next((r.path for r in _routes_at(scope) if r.matches(scope)[0] is Match.FULL), "")
        log_request(route, error.code, status=error.kind.status, **error.noted)
        if self._traces.is_on and route:
            told: dict[str, Attribute] = {"error.type": error.code}
            told["http.response.status_code"] = error.kind.status
            name = f"{scope['method']} {route}"
            attributes = named(route) | told
            self._traces.ended(RequestSpan(name, PARENT.get(), seconds, error.code, attributes))


def _check_query(query: bytes) -> None:
    """Refuse a query with too many fields before the event loop parses it."""
    num_fields = query.count(b"&") + 1
    if num_fields > _MAX_FIELDS:
        message = f"The query has {num_fields:,} fields; the limit is {_MAX_FIELDS}."
        raise RequestError("invalid_value", message)


def _parent(headers: Headers) -> dict[str, str]:
    """The span of the client's that this request is part of, as W3C's headers name it."""
    return {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}


def _once_taken(receive: Receive, send: Send) -> Send:
    """Ends the answer once the upload has, within bounds.

    A connection that is closed with bytes unread is reset, and the client may lose the answer.
    """

    async def take_rest() -> None:
        num_taken, is_whole = 0, False
        while not is_whole and num_taken < _MAX_TAKEN:
            message = await receive()
            num_taken += len(message.get("body", b""))
            is_whole = not message.get("more_body", False)

    async def send_last(message: Message) -> None:
        if message["type"] == "http.response.body":
            await send({**message, "more_body": True})
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(take_rest(), _TAKING_S)
            message = {**message, "body": b""}
        await send(message)

    return send_last


def new_request_id(headers: Headers) -> str:
    """The client's own if it is fit to be shown, else a fresh one."""
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
