"""Answers of one JSON body, and what every answer has: a request id, an error where code failed."""

import asyncio
import contextlib
import logging
import math
import re
import secrets
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headrace.core.errors import RequestError
from headrace.protocols import openai
from headrace.protocols.dialect import ErrorForm, dialect_of, encode, spoken_at
from headrace.streams.events import Error
from headrace.streams.log import LogGone
from headrace.streams.record import Record
from headrace.streams.store import StoreStalled

logger = logging.getLogger(__name__)

_MAX_TAKEN, _TAKING_S = 1 << 20, 1.0  # of an upload that was refused
_REQUEST_ID = re.compile(r"[\x20-\x7e]{1,128}")


_WITH_PAUSE = (429, 503)
_CLOSING = ("request_too_large", "body_timeout", "server_shutdown")
"""After these nothing more is read from the connection."""

_DEFAULT_PAUSE_S = 1.0
_ID_KEY = "headrace.request_id"  # in a scope


def answer(body: dict[str, Any]) -> Response:
    return Response(encode(body), media_type="application/json")


def request_id_of(scope: Scope) -> str:
    """The id that ErrorBoundary gave the request."""
    return str(scope.get(_ID_KEY, ""))


def refuse(error: RequestError, path: str = "", request_id: str = "") -> Response:
    """The answer to a request that was not admitted, in the dialect of its path."""
    kind, form = error.kind, _errors_at(path)
    headers = _headers(kind.status, kind.retry, error.retry_after_s)
    if kind.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.code in _CLOSING:
        headers["Connection"] = "close"
    body = form.body(error, request_id)
    return Response(body, form.status(kind.status), headers, "application/json")


def cut(event: Error, record: Record, request_id: str) -> Response:
    """The answer to a request whose stream was cut before any of it was sent."""
    form = dialect_of(record.request.route).ERRORS
    headers = _headers(event.status, event.retryable, _DEFAULT_PAUSE_S)
    headers["X-Stream-Id"] = record.id
    body = form.body(event, request_id)
    return Response(body, form.status(event.status), headers, "application/json")


async def no_such_route(request: Request, error: Exception) -> Response:
    """Starlette's 404 and 405 in the shape of all other errors."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        refusal = RequestError("method_not_allowed", f"This route takes {allowed} only.")
        response = refuse(refusal, request.url.path, request_id_of(request.scope))
        response.headers["Allow"] = allowed
        return response
    message = "There is no such route; /openapi.json lists those there are."
    refusal = RequestError("route_not_found", message)
    return refuse(refusal, request.url.path, request_id_of(request.scope))


def _errors_at(path: str) -> ErrorForm:
    dialect = spoken_at(path)
    return dialect.ERRORS if dialect else openai.ERRORS


def _headers(status: int, retry: bool, pause_s: float) -> dict[str, str]:
    headers = {"x-should-retry": "true" if retry else "false"}
    if status in _WITH_PAUSE:
        headers["Retry-After"] = str(max(1, math.ceil(pause_s)))
        headers["retry-after-ms"] = str(math.ceil(pause_s * 1000))
    return headers


def notice_of(error: Exception) -> RequestError:
    """What a reader is told of an error that ends its answer before the stream has ended."""
    match error:
        case StoreStalled():
            return RequestError("storage_stalled", "The stream cannot be read now; read on later.")
        case RequestError():
            return error
        case LogGone():
            return RequestError("stream_not_found", "The stream was deleted.")
    logger.error("A stream could not be rendered", exc_info=error)
    return RequestError("internal_error", "The server failed on this stream.")


class ErrorBoundary:
    """ASGI middleware; the outermost loop of a request, so nothing passes it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(Headers(scope=scope))
        path, has_begun = scope["path"], False
        names = {"X-Request-Id", _errors_at(path).REQUEST_ID}
        scope = {**scope, _ID_KEY: request_id}

        async def send_with_id(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                MutableHeaders(scope=message).update(dict.fromkeys(names, request_id))
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            pass  # left before the body was whole: there is nobody to answer
        except RequestError as error:
            is_upload = error.code == "request_too_large"
            last_send = _once_taken(receive, send_with_id) if is_upload else send_with_id
            await refuse(error, path, request_id)(scope, receive, last_send)
        except LogGone as gone:
            await refuse(notice_of(gone), path, request_id)(scope, receive, send_with_id)
        except Exception:
            logger.exception("Request %s failed", request_id)
            if has_begun:
                raise
            failure = RequestError("internal_error", "The server failed on this request.")
            await refuse(failure, path, request_id)(scope, receive, send_with_id)


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


def _request_id(headers: Headers) -> str:
    given = headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
