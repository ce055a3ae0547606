"""Clients of the WebSocket /v1/realtime-text: several requests at a time on one socket."""

from typing import Any

from detangle import flip, randint

from stress.simulated_server.clients.common import CHAT, Backoff, Event, is_later
from stress.simulated_server.clients.conversations import check_cut
from stress.simulated_server.clients.events import ENDS, add
from stress.simulated_server.http import Broken
from stress.simulated_server.requests import Request
from stress.simulated_server.websocket import WebSocket, open_socket
from stress.simulated_server.world import World


class SocketStream:
    """One request of a socket's client, and the events that it has seen so far."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.stream_id = ""
        self.events: list[Event] = []

    @property
    def has_ended(self) -> bool:
        return bool(self.events) and self.events[-1]["kind"] in ENDS

    def opening(self, id: str) -> dict[str, Any]:
        """Return the message that opens the stream or continues to read it."""
        if not self.stream_id:
            body = self.request.body(is_stream=True)
            named = {"idempotency_key": self.request.key, "body": body}
            return {"type": "request", "id": id, "route": CHAT, **named}
        opening = {"type": "attach", "id": id, "stream": self.stream_id}
        return opening | ({"after": len(self.events) - 1} if self.events else {})


class SocketClient:
    """Runs several streams on one socket, and opens a new socket after each loss."""

    def __init__(self, world: World, streams: list[SocketStream]) -> None:
        self._world = world
        self._streams = streams
        self._num_ids = 0
        # Ids that this client has stopped, perhaps before the server had read their requests.
        self._stopped: set[str] = set()
        # The streams that this socket reads, by the id of the request.
        self._running: dict[str, SocketStream] = {}

    async def run(self) -> None:
        backoff = Backoff()
        while not all(stream.has_ended for stream in self._streams):
            try:
                socket = open_socket(self._world.server, "/v1/realtime-text")
                assert await self._world.in_time(socket, socket.begin()) == 101
                await self._use(socket)
                socket.close()
            except Broken:
                await backoff.pause()

    async def _use(self, socket: WebSocket) -> None:
        self._running = {}
        backoff = Backoff()
        while not all(stream.has_ended for stream in self._streams):
            idle = [it for it in self._streams if it not in self._running.values()]
            for stream in idle:
                if not stream.has_ended:
                    self._open(socket, stream)
            # Before a request is accepted, the server sends nothing.
            is_due = any(it.stream_id for it in self._running.values())
            receiving = socket.receive()
            message = await (self._world.in_time(socket, receiving) if is_due else receiving)
            if not self._take(message):
                await backoff.pause()
            self._disturb(socket)

    def _open(self, socket: WebSocket, stream: SocketStream) -> None:
        self._num_ids += 1
        id = str(self._num_ids)
        self._running[id] = stream
        socket.send(stream.opening(id))

    def _take(self, message: dict[str, Any]) -> bool:
        """Apply a message; return whether the request with its id can go on."""
        stream = self._running.get(message.get("id") or "")
        if message["type"] == "error":
            code = message["error"]["code"]
            is_stopped = code == "cancelled" and message["id"] in self._stopped
            is_known = is_stopped or is_later(self._world, code) or self._world.may_fail(code)
            assert is_known, f"{message}"
        if stream is None or message["type"] != "response":
            # The end of the server is announced, or this reading has ended.
            self._running.pop(message.get("id") or "", None)
            return "id" not in message or stream is None
        if not stream.stream_id:
            stream.stream_id = message["stream"]
            self._world.reads.append((stream.stream_id, stream.events))
        if "seq" in message["event"]:
            add(stream.events, message["event"])
        if stream.has_ended:
            del self._running[message["id"]]
        return True

    def _disturb(self, socket: WebSocket) -> None:
        """Sometimes detach from a stream, stop a stream, or cut the socket."""
        if flip(0.01):
            self._world.faults.note("client: socket cut")
            socket.close()
            raise Broken
        if flip(0.01) and self._running:
            id = [*self._running][randint(0, len(self._running) - 1)]
            if flip(0.5):
                self._world.faults.note("client: detached")
                del self._running[id]
                socket.send({"type": "notification", "detach": id})
            else:
                self._world.faults.note("client: stopped a stream")
                self._stopped.add(id)
                socket.send({"type": "notification", "stop": id})


async def uses_a_socket(world: World, request: Request) -> None:
    """Run up to four requests on one socket; the log of each must be whole."""
    others = [world.new_request() for _ in range(randint(0, 3))]
    streams = [SocketStream(it) for it in (request, *others)]
    await SocketClient(world, streams).run()
    for stream in streams:
        check_cut(world, stream.request, stream.events, "cancelled")
        world.counts["streams on a socket"] += 1
