"""Answers of one JSON body; errors with the headers that tell clients what to do."""

import math
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from headrace.core.errors import RequestError
from headrace.protocols.frames import cut_body, encode, error_body
from headrace.streams.events import Error

_WITH_PAUSE = (429, 503)
_CLOSING = ("request_too_large", "body_timeout", "server_shutdown")
"""After these nothing more is read from the connection."""

_DEFAULT_PAUSE_S = 1.0


def answer(body: dict[str, Any]) -> Response:
    return Response(encode(body), media_type="application/json")


def refuse(error: RequestError) -> Response:
    """The answer to a request that was not admitted."""
    kind = error.kind
    headers = _headers(kind.status, kind.retry, error.retry_after_s)
    if kind.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if error.code in _CLOSING:
        headers["Connection"] = "close"
    body = error_body(error.code, kind.type, error.message, error.param, error.extra)
    return Response(body, kind.status, headers, "application/json")


def cut(event: Error, stream_id: str) -> Response:
    """The answer to a request whose stream was cut before any of it was sent."""
    headers = _headers(event.status, event.retryable, _DEFAULT_PAUSE_S)
    headers["X-Stream-Id"] = stream_id
    return Response(cut_body(event), event.status, headers, "application/json")


async def no_such_route(request: Request, error: Exception) -> Response:
    """Starlette's 404 and 405 in the shape of all other errors."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "")
        response = refuse(RequestError("method_not_allowed", f"This route takes {allowed} only."))
        response.headers["Allow"] = allowed
        return response
    message = "There is no such route; /openapi.json lists those there are."
    return refuse(RequestError("route_not_found", message))


def _headers(status: int, retry: bool, pause_s: float) -> dict[str, str]:
    headers = {"x-should-retry": "true" if retry else "false"}
    if status in _WITH_PAUSE:
        headers["Retry-After"] = str(max(1, math.ceil(pause_s)))
        headers["retry-after-ms"] = str(math.ceil(pause_s * 1000))
    return headers
