"""A Hugging Face hub on loopback: the few routes that a download asks for."""

import contextlib
import hashlib
import http.server
import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_WEIGHTS = (".safetensors", ".gguf")
_RANGE = re.compile(r"bytes=(\d+)-")
_ROUTE = re.compile(
    r"/(?:api/models/)?(?P<repo>[^/]+/[^/]+?)"
    r"(?:/(?P<kind>revision|tree|resolve)/(?P<revision>[^/]+)(?:/(?P<file>.+))?)?"
)


class SmallHub(http.server.ThreadingHTTPServer):
    """Serves folders as repositories, `repos` by id; `asked` has every path that was asked for.

    Weights stop half-way while `flows` is not set. `claims` are sizes that it tells instead of the
    true ones; `starts` has the first byte of each request for weights.

    `gguf` is what it says of the repositories' GGUF files. With `tells_all`, it describes a gated
    repository without the token. With `refuses_token`, it knows no token.

    A hostile hub `also_lists` more files, names another `commit`, sends other `heads` with a file,
    redirects to itself, sends one file without end, or weights `drips` bytes a second.
    """

    daemon_threads = True

    def __init__(self, repos: dict[str, Path], token: str | None = None) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repos, self.token = repos, token
        self.asked: list[str] = []
        self.flows = threading.Event()
        self.flows.set()
        self.claims: dict[str, object] = {}
        self.also_lists: list[dict[str, object]] = []
        self.commit: object = COMMIT
        self.gguf: object = None
        self.tells_all = False
        self.refuses_token = False
        self.heads: dict[str, str] = {}
        self.redirects = False
        self.endless = ""
        self.drips = 0
        self.starts: list[int] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: SmallHub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        self.server.asked.append(path)
        found = _ROUTE.fullmatch(path)
        folder = self.server.repos.get(found["repo"]) if found else None
        authorization = self.headers.get("authorization")
        is_open = self.server.tells_all and found is not None and found["kind"] != "resolve"
        is_gated = self.server.token is not None and not is_open
        if is_gated and authorization != f"Bearer {self.server.token}":
            self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif self.server.refuses_token:
            message = "Invalid credentials in Authorization header"
            self._send(401, b"{}", {"X-Error-Message": message})
        elif self.server.redirects:
            self._send(302, b"", {"Location": self.path})
        elif found is None or folder is None:
            self._send(401, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif (found["revision"] or "main") not in ("main", "v1", COMMIT):
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif found["kind"] == "tree":
            self._send(200, json.dumps([_entry(file, folder) for file in _files(folder)]).encode())
        elif found["kind"] == "resolve":
            self._send_file(folder / found["file"])
        else:
            self._send(200, json.dumps(_info(found["repo"], folder, self.server)).encode())

    do_HEAD = do_GET

    def _send_file(self, file: Path) -> None:
        if not file.is_file():
            self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})
            return
        content = file.read_bytes()
        headers = {"ETag": f'"{_digest(file)}"', "X-Repo-Commit": COMMIT} | self.server.heads
        asked = _RANGE.fullmatch(self.headers.get("range", ""))
        first, size = int(asked[1]) if asked else 0, len(content)
        if self.command == "GET" and file.suffix in _WEIGHTS:
            self.server.starts.append(first)
        if self.command == "GET" and file.name == self.server.endless:
            self._send_for_ever(headers)
            return
        if asked is None:
            self._send(200, content, headers)
            return
        span = {"Content-Range": f"bytes {first}-{size - 1}/{size}"}
        if self.server.drips and self.command == "GET":
            self._drip(content[first:], headers | span)
            return
        self._send(206, content[first:], headers | span)

    def _drip(self, body: bytes, headers: dict[str, str]) -> None:
        self._send_head(206, {**headers, "Content-Length": str(len(body))})
        at_once = max(1, self.server.drips // 20)
        with contextlib.suppress(ConnectionError):
            for at in range(0, len(body), at_once):
                self.wfile.write(body[at : at + at_once])
                time.sleep(0.05)

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            is_weights = self.path.endswith(_WEIGHTS)
            half = len(body) // 2
            with contextlib.suppress(ConnectionError):  # a client that was killed
                for part in (body[:half], body[half:]):
                    self.wfile.write(part)
                    if is_weights:
                        self.server.flows.wait()

    def _send_head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _send_for_ever(self, headers: dict[str, str]) -> None:
        self._send_head(200, headers)
        self.close_connection = True
        with contextlib.suppress(ConnectionError):
            while True:
                self.wfile.write(bytes(1 << 16))

    def log_message(self, *_: object) -> None:
        pass


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


def _entry(file: Path, folder: Path) -> dict[str, object]:
    return {
        "type": "file",
        "oid": _digest(file),
        "size": file.stat().st_size,
        "path": str(file.relative_to(folder)),
    }


def _info(repo: str, folder: Path, hub: SmallHub) -> dict[str, object]:
    sizes = {str(file.relative_to(folder)): file.stat().st_size for file in _files(folder)}
    files = [{"rfilename": name, "size": hub.claims.get(name, sizes[name])} for name in sizes]
    listed = [*files, *hub.also_lists]
    return {
        "_id": "1", "id": repo, "modelId": repo, "sha": hub.commit, "siblings": listed, "tags": [],
        "gguf": hub.gguf,
    }  # fmt: skip


def _digest(file: Path) -> str:
    """The SHA-256 of weights, as the hub names what is large; of the rest a shorter one."""
    of = hashlib.sha256 if file.suffix in _WEIGHTS else hashlib.sha1
    return of(file.read_bytes()).hexdigest()


@contextlib.contextmanager
def small_hub(repos: dict[str, Path], token: str | None = None) -> Iterator[SmallHub]:
    with SmallHub(repos, token) as hub:
        threading.Thread(target=hub.serve_forever, daemon=True).start()
        yield hub
        hub.shutdown()
