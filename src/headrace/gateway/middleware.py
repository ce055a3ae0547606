"""Middleware before all routes: prefixes and spellings of paths, and cross-origin pages."""

import re
from collections.abc import Awaitable

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from headrace.gateway.http_responses import new_request_id, refuse
from headrace.gateway.web_routes import PAGES
from headrace_common.errors import RequestError

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

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] not in ("http", "websocket") or not self._prefix:
            return self._app(scope, receive, send)
        path = "/" + scope["path"].lstrip("/")
        if path.startswith(f"{self._prefix}/"):
            return self._app(_at(path[len(self._prefix) :], scope), receive, send)
        if path == self._prefix and scope["type"] == "http":
            # Links on the page are relative to its folder, so its address must end in a slash.
            return RedirectResponse(f"{self._prefix}/")(scope, receive, send)
        return self._refuse(scope, receive, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = f"There is no such route; all of this server's are below {self._prefix}/."
        request_id = new_request_id(Headers(scope=scope))
        response = refuse(RequestError("route_not_found", message), "", request_id)
        response.headers["X-Request-Id"] = request_id
        if scope["type"] == "websocket":
            await WebSocket(scope, receive, send).send_denial_response(response)
        else:
            await response(scope, receive, send)


class CanonicalPath:
    """ASGI middleware: corrects the path of a client whose base URL differs slightly.

    The base URL may end in a slash, or lack the /v1 that OpenAI's and Anthropic's clients expect.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] in ("http", "websocket"):
            path = canonical(scope["path"])
            if path != scope["path"]:
                scope = _at(path, scope)
        return self._app(scope, receive, send)


_WITHOUT_V1 = ("messages", "responses", "embeddings")
_BEFORE_IDS = ("/v1/stream/", "/v1/models/")  # which may have any slashes


def canonical(path: str) -> str:
    """The path as the table of routes has it."""
    path = "/" + path.lstrip("/")
    if path.startswith(_BEFORE_IDS) and path not in _BEFORE_IDS:
        return path
    path = re.sub("//+", "/", path)
    short = path.rstrip("/")
    if short and short not in PAGES:  # the links of a page are relative to its folder
        path = short
    return f"/v1{path}" if path.split("/", 2)[1] in _WITHOUT_V1 else path


def _at(path: str, scope: Scope) -> Scope:
    return {**scope, "path": path, "raw_path": path.encode()}


class CrossOrigin(CORSMiddleware):
    """Answers preflights before any key is asked for: a browser sends none with them."""

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        response.headers["X-Request-Id"] = new_request_id(request_headers)
        if "access-control-allow-origin" not in response.headers:
            del response.headers["Access-Control-Allow-Private-Network"]
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
            allow_private_network=True,
        )
    ]
