"""Serves the web pages. The pages are the same for all clients, so they need no key."""

import gzip
import hashlib
import html
from functools import cached_property
from pathlib import Path

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Scope

import headrace

FOLDER = Path(headrace.__file__).parent / "web"
PAGES = {"/": "index.html", "/dashboard": "dashboard.html", "/batches": "batches.html"}
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""Media types by file extension. Files with another extension are not served."""

# Allow no inline script or style, no other host, and no string that becomes HTML. Pictures that a
# person attaches are shown from data URIs.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    # Browsers keep the file, and use its ETag to check whether the file has changed.
    "Cache-Control": "no-cache",
    "Vary": "Accept-Encoding",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class WebFile:
    """Serves one file from memory, compressed if the client accepts gzip.

    The answer has status 304 if the client's ETag is current.
    """

    _headers = _HEADERS

    def __init__(self, path: Path) -> None:
        self._body = path.read_bytes()
        self._hash = hashlib.sha256(self._body).hexdigest()[:32]
        self._type = TYPES[path.suffix]

    @cached_property
    def _packed(self) -> bytes:
        return gzip.compress(self._body, 6, mtime=0)

    async def read(self, request: Request) -> ASGIApp:
        is_packed = "gzip" in request.headers.get("accept-encoding", "")
        etag = f'"{self._hash}-gzip"' if is_packed else f'"{self._hash}"'
        headers = {**self._headers, "ETag": etag}
        known = request.headers.get("if-none-match", "")
        if etag in [tag.strip().removeprefix("W/") for tag in known.split(",")]:
            return Response(status_code=304, headers=headers)
        if is_packed:
            headers["Content-Encoding"] = "gzip"
        return Response(self._packed if is_packed else self._body, 200, headers, self._type)


class StartPage(WebFile):
    """Serves the start page to browsers, and Ollama's short text to all other clients."""

    _headers = {**_HEADERS, "Vary": "Accept, Accept-Encoding"}

    async def read(self, request: Request) -> ASGIApp:
        if is_from_browser(request.scope):
            return await super().read(request)
        return PlainTextResponse("Ollama is running", headers={"Vary": "Accept"})


HOME = "headrace.home"
"""Key in an ASGI scope: the relative address of the start page, seen from the request's path."""


def home_of(scope: Scope, prefix: str) -> str:
    """Return the relative address of the start page, seen from the path that the client sent.

    A proxy may serve this server below a further path, which only the browser knows.
    """
    path: bytes = scope.get("raw_path", b"")
    return "../" * (path.count(b"/") - 1) + f"{prefix}/"[1:]


def is_from_browser(scope: Scope) -> bool:
    """Return whether a person opens the address in a browser."""
    accept = Headers(scope=scope).get("accept", "")
    return scope["method"] in ("GET", "HEAD") and "text/html" in accept


def missing_page(scope: Scope, status: int, reason: str) -> Response:
    """Return a page that says why there is no page at this path, with links to other pages."""
    page = _MISSING.replace("<!-- reason -->", html.escape(reason))
    for link in ('href="', 'src="'):
        page = page.replace(link, link + scope[HOME])
    return Response(page, status, {**_HEADERS, "Vary": "Accept"}, TYPES[".html"])


_MISSING = (FOLDER / "missing.html").read_text()


def web_routes() -> list[Route]:
    """Return the routes of the pages, and of all other files below /web/."""
    found = [path for path in FOLDER.rglob("*") if path.suffix in TYPES]
    files = {path.relative_to(FOLDER).as_posix(): WebFile(path) for path in found}
    files[PAGES["/"]] = StartPage(FOLDER / PAGES["/"])
    paths = {**PAGES, **{f"/web/{name}": name for name in files if not name.endswith(".html")}}
    return [
        Route(path, files[name].read, methods=["GET"], include_in_schema=False)
        for path, name in sorted(paths.items())
    ]
