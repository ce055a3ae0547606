"""Middleware before all routes: the path that the server lies below, and cross-origin pages."""

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from headrace.core.errors import RequestError
from headrace.gateway.http_responses import new_request_id, refuse

_READABLE = (
    "X-Request-Id",
    "X-Stream-Id",
    "X-Stream-Mode",
    "X-Stream-Attached",
    "X-Headrace-Ignored",
    "X-Headrace-Messages-Changed",
    "X-Headrace-Tools",
    "X-Should-Retry",
    "Retry-After",
    "Retry-After-Ms",
    "Stream-Next-Offset",
    "Stream-Up-To-Date",
    "Stream-Closed",
    "Stream-Cursor",
    "Stream-SSE-Data-Encoding",
    "ETag",
)


class PathPrefix:
    """ASGI middleware: takes the prefix off paths, and refuses those that do not begin with it."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or not self._prefix:
            await self._app(scope, receive, send)
            return
        path: str = scope["path"]
        if path.startswith(f"{self._prefix}/"):
            raw = scope.get("raw_path") or path.encode()
            taken = {"path": path[len(self._prefix) :], "raw_path": raw[len(self._prefix) :]}
            await self._app({**scope, **taken}, receive, send)
        elif path == self._prefix and scope["type"] == "http":
            # what the page refers to is relative to the folder that it lies in
            await RedirectResponse(f"{self._prefix}/")(scope, receive, send)
        else:
            await self._refuse(scope, receive, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = f"There is no such route; all of this server's are below {self._prefix}/."
        request_id = new_request_id(Headers(scope=scope))
        response = refuse(RequestError("route_not_found", message), "", request_id)
        response.headers["X-Request-Id"] = request_id
        if scope["type"] == "websocket":
            await WebSocket(scope, receive, send).send_denial_response(response)
        else:
            await response(scope, receive, send)


class CrossOrigin(CORSMiddleware):
    """Answers preflights before any key is asked for: a browser sends none with them."""

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        response.headers["X-Request-Id"] = new_request_id(request_headers)
        return response


def cross_origin(origins: tuple[str, ...]) -> list[Middleware]:
    """Middleware for cross-origin pages; none unless some are allowed. Cookies are never taken."""
    if not origins:
        return []
    return [
        Middleware(
            CrossOrigin,
            allow_origins=origins,
            allow_methods=("GET", "POST", "PUT", "DELETE"),
            allow_headers=("*",),
            expose_headers=_READABLE,
        )
    ]
