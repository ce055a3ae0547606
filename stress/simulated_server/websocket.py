"""WebSockets without sockets: one connection to the server's ASGI application."""

import asyncio
import json
from collections import deque
from typing import Any

from headrace.gateway.realtime import GOING_AWAY
from stress.simulated_server.http import Broken, Connection
from stress.simulated_server.server import SimServer

_NO_STATUS = 1005


class WebSocket(Connection):
    """One WebSocket. `close_code` is 0 while it is open."""

    def __init__(self, server: SimServer, path: str) -> None:
        self.close_code = 0
        self._sent: deque[dict[str, Any]] = deque([{"type": "websocket.connect"}])
        self._has_sent = asyncio.Event()
        super().__init__(server, "WS", path, {}, b"")
        server.farewells.append(self._say_farewell)
        self.task.add_done_callback(lambda _: server.farewells.remove(self._say_farewell))

    def send(self, message: dict[str, Any]) -> None:
        self._put({"type": "websocket.receive", "text": json.dumps(message)})

    async def receive(self) -> dict[str, Any]:
        """Wait for a message. Raise Broken if the socket is closed."""
        while not self._unread:
            if self.close_code:
                raise Broken
            await self._wait()
        text = self._unread.popleft()
        self._has_room.set()
        message: dict[str, Any] = json.loads(text)
        return message

    def close(self) -> None:
        self._put({"type": "websocket.disconnect", "code": _NO_STATUS})
        super().close()

    def _say_farewell(self) -> None:
        self._put({"type": "websocket.disconnect", "code": GOING_AWAY})

    def _put(self, message: dict[str, Any]) -> None:
        self._sent.append(message)
        self._has_sent.set()

    def _scope(self, method: str, target: str, headers: dict[str, str]) -> dict[str, Any]:
        scope = super()._scope(method, target, headers)
        del scope["method"]
        return {
            **scope,
            "type": "websocket",
            "scheme": "ws",
            "subprotocols": [],
            "extensions": {"websocket.http.response": {}},
        }

    async def _receive(self) -> dict[str, Any]:
        while not self._sent:
            self._has_sent.clear()
            await self._has_sent.wait()
        return self._sent.popleft()

    async def _send(self, message: dict[str, Any]) -> None:
        kind = message["type"]
        if self._is_closed.is_set() or self.close_code:
            # uvicorn reports a closed connection in this way.
            raise OSError("the client has left")
        if kind == "websocket.accept":
            self.status = 101
        elif kind == "websocket.close":
            self.close_code = message.get("code", 1000)
        elif kind == "websocket.http.response.start":
            self.status = message["status"]
        else:
            assert kind == "websocket.send", f"{self.task.get_name()} was refused: {message}"
            await self._take(message["text"].encode())
        self._changed.set()


def open_socket(server: SimServer | None, path: str) -> WebSocket:
    """Open a WebSocket. Raise Broken if no server listens."""
    if server is None or server.app is None or server.has_ended.is_set():
        raise Broken
    return WebSocket(server, path)
