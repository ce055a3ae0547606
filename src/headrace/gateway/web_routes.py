"""The page: files of the package, alike for everybody, so that they ask for no key."""

import gzip
import hashlib
from functools import cached_property
from pathlib import Path

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

import headrace

FOLDER = Path(headrace.__file__).parent / "web"
PAGES = {"/": "index.html", "/dashboard": "dashboard.html", "/batches": "batches.html"}
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""Types by ending; files with another ending are not served."""

# No inline script or style, no other host, and no string that becomes HTML. Pictures that a person
# attaches are shown from data URIs.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "Cache-Control": "no-cache",  # kept, and asked for again by its ETag
    "Vary": "Accept-Encoding",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


class WebFile:
    """One file in memory, packed if the client takes that; 304 to one that has it."""

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
    """Serves the start page to browsers, and to other clients the text that Ollama's API has."""

    _headers = {**_HEADERS, "Vary": "Accept, Accept-Encoding"}

    async def read(self, request: Request) -> ASGIApp:
        if "text/html" in request.headers.get("accept", ""):
            return await super().read(request)
        return PlainTextResponse("Ollama is running", headers={"Vary": "Accept"})


def web_routes() -> list[Route]:
    """Return the routes of the pages, and of everything else below /web/."""
    found = [path for path in FOLDER.rglob("*") if path.suffix in TYPES]
    files = {path.relative_to(FOLDER).as_posix(): WebFile(path) for path in found}
    files[PAGES["/"]] = StartPage(FOLDER / PAGES["/"])
    paths = {**PAGES, **{f"/web/{name}": name for name in files if not name.endswith(".html")}}
    return [
        Route(path, files[name].read, methods=["GET"], include_in_schema=False)
        for path, name in sorted(paths.items())
    ]
