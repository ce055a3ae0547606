"""HTTP without sockets: one request to the server's ASGI application."""

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator
from contextvars import ContextVar
from typing import Any

from stress.simulated_server.server import SimServer

MAX_UNREAD = 8
"""The server's `send` waits while a client has this many unread messages."""


ADMIN_KEY, CLIENT_KEYS = "admin", ("key-a", "key-b")
API_KEY: ContextVar[str] = ContextVar("api_key", default=ADMIN_KEY)
"""The API key that a client sends. A server without keys ignores it."""


class Broken(Exception):
    """Raised if the connection ended before the answer was complete."""


class Connection:
    """One request and its answer. The request runs in the server's process."""

    def __init__(
        self,
        server: SimServer,
        method: str,
        target: str,
        headers: dict[str, str],
        body: bytes,
        pause_s: float = 0.0,
    ) -> None:
        """With `pause_s`, the second half of the body arrives that much later."""
        assert server.app is not None
        self.status = 0
        self.headers: dict[str, str] = {}
        self._server = server
        self._unread: deque[bytes] = deque()
        self._is_complete = False
        self._is_closed = asyncio.Event()
        self._changed = asyncio.Event()
        self._has_room = asyncio.Event()
        self._has_room.set()
        half = len(body) // 2 if pause_s else 0
        self._parts = deque([body[:half], body[half:]] if half else [body])
        self._pause_s = pause_s
        # Whether the server sent parts of the answer after this side had closed.
        self.missed_parts = False
        self.task = asyncio.get_running_loop().create_task(
            self._answer(server.app, self._scope(method, target, headers)),
            name=f"{method} {target.partition('?')[0]}",
            context=server.context.copy(),
        )
        server.requests[self.task] = None
        self.task.add_done_callback(server.requests.pop)

    def _scope(self, method: str, target: str, headers: dict[str, str]) -> dict[str, Any]:
        path, _, query = target.partition("?")
        given = {"host": "localhost:8000", "authorization": f"Bearer {API_KEY.get()}", **headers}
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(name.lower().encode(), it.encode()) for name, it in given.items()],
            "client": ("127.0.0.1", 1234),
            "server": ("127.0.0.1", 8000),
            "state": {},
        }

    async def _answer(self, app: Any, scope: dict[str, Any]) -> None:
        try:
            await app(scope, self._receive, self._send)
        finally:
            # uvicorn closes a connection whose answer is incomplete.
            self._is_closed.set()
            self._changed.set()

    async def _receive(self) -> dict[str, Any]:
        if self._parts:
            body = self._parts.popleft()
            if self._pause_s and not self._parts:
                await asyncio.sleep(self._pause_s)
            return {"type": "http.request", "body": body, "more_body": bool(self._parts)}
        await self._is_closed.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        if self._is_closed.is_set():
            self.missed_parts = True
            return
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = {k.decode().lower(): v.decode() for k, v in message["headers"]}
        else:
            self._is_complete = not message.get("more_body", False)
            await self._take(bytes(message.get("body", b"")))
        self._changed.set()

    async def _take(self, piece: bytes) -> None:
        """Keep a piece for the client, and wait while the client has too many unread pieces."""
        if piece:
            self._unread.append(piece)
        self._changed.set()
        if len(self._unread) >= MAX_UNREAD:
            self._has_room.clear()
            await self._has_room.wait()

    @property
    def unread(self) -> bytes:
        """Return the part of the body that has arrived and was not read."""
        return b"".join(self._unread)

    def close(self) -> None:
        """Leave: the server notices, and nothing more arrives."""
        self._is_closed.set()
        self._has_room.set()

    async def begin(self) -> int:
        """Wait for the head of the answer, and return the status."""
        while not self.status:
            await self._wait()
        return self.status

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the body's pieces. Raise Broken if the connection ends before the body does."""
        while True:
            while self._unread:
                piece = self._unread.popleft()
                self._has_room.set()
                yield piece
            if self._is_complete:
                return
            await self._wait()

    async def read(self) -> bytes:
        await self.begin()
        return b"".join([piece async for piece in self.chunks()])

    async def _wait(self) -> None:
        """Wait until something arrives. Raise Broken if nothing can arrive any more."""
        if self._unread or self._is_complete:
            return
        if self._server.has_ended.is_set() or self._is_closed.is_set():
            raise Broken
        self._changed.clear()
        changed = asyncio.create_task(self._changed.wait())
        ended = asyncio.create_task(self._server.has_ended.wait())
        try:
            await asyncio.wait((changed, ended), return_when=asyncio.FIRST_COMPLETED)
        finally:
            changed.cancel()
            ended.cancel()


def connect(
    server: SimServer | None,
    method: str,
    target: str,
    headers: dict[str, str],
    body: Any = None,
    pause_s: float = 0.0,
) -> Connection:
    """Send a request. Raise Broken if no server listens."""
    if server is None or server.app is None or server.has_ended.is_set():
        raise Broken
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    given = {"content-type": "application/json", "content-length": str(len(data)), **headers}
    return Connection(server, method, target, given, data, pause_s)
