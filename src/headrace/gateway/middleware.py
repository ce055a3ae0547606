"""ASGI middleware before all routes: path prefix, path spelling, cross-origin requests."""

import re
from collections.abc import Awaitable

from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket

from headrace.gateway.http_responses import new_request_id, refuse_path
from headrace.gateway.web_routes import HOME, PAGES, home_of
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
    """ASGI middleware that removes the prefix from paths, and refuses paths without it."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app = app
        self._prefix = prefix

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] not in ("http", "websocket"):
            return self._app(scope, receive, send)
        scope = {**scope, HOME: home_of(scope, self._prefix)}
        if not self._prefix:
            return self._app(scope, receive, send)
        path = "/" + scope["path"].lstrip("/")
        if path.startswith(f"{self._prefix}/"):
            return self._app(_at(path[len(self._prefix) :], scope), receive, send)
        if path == self._prefix and scope["type"] == "http":
            # Links on the page are relative to the page's folder, so the page's address must end
            # in a slash.
            return RedirectResponse(f"{self._prefix}/")(scope, receive, send)
        return self._refuse(scope, receive, send)

    async def _refuse(self, scope: Scope, receive: Receive, send: Send) -> None:
        message = f"This route does not exist; all routes of this server are below {self._prefix}/."
        request_id = new_request_id(Headers(scope=scope))
        refusal = RequestError("route_not_found", message)
        response = refuse_path(refusal, scope, "", request_id)
        response.headers["X-Request-Id"] = request_id
        if scope["type"] == "websocket":
            await WebSocket(scope, receive, send).send_denial_response(response)
        else:
            await response(scope, receive, send)


class CanonicalPath:
    """ASGI middleware that corrects the path of a client whose base URL differs slightly.

    The base URL can end in a slash, or lack the /v1 that clients of OpenAI and Anthropic expect.
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
# After these prefixes, the path contains an id, which can contain any slashes.
_BEFORE_IDS = ("/v1/stream/", "/v1/models/")


def canonical(path: str) -> str:
    """Normalize slashes, so that the path matches the route table."""
    path = "/" + path.lstrip("/")
    if path.startswith(_BEFORE_IDS) and path not in _BEFORE_IDS:
        return path
    path = re.sub("//+", "/", path)
    short = path.rstrip("/")
    # Links on a page are relative to the page's folder, so the path of a page keeps its last slash.
    if short and short not in PAGES:
        path = short
    return f"/v1{path}" if path.split("/", 2)[1] in _WITHOUT_V1 else path


def _at(path: str, scope: Scope) -> Scope:
    return {**scope, "path": path, "raw_path": path.encode()}


class CrossOrigin(CORSMiddleware):
    """Answers preflight requests before the check of the key.

    Browsers send no key with a preflight request.
    """

    def preflight_response(self, request_headers: Headers) -> Response:
        response = super().preflight_response(request_headers)
        response.headers["X-Request-Id"] = new_request_id(request_headers)
        if "access-control-allow-origin" not in response.headers:
            del response.headers["Access-Control-Allow-Private-Network"]
        return response


def cross_origin(origins: tuple[str, ...]) -> list[Middleware]:
    """Return CORS middleware if any origins are allowed. Cookies are never allowed."""
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
