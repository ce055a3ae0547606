"""Tests sockets whose clients send many frames, read nothing, or never end a message."""

import asyncio
import contextlib
import struct
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from starlette.datastructures import Headers

from headrace.gateway.auth import Auth
from headrace.gateway.http_server import HttpServer
from headrace.gateway.realtime import RealtimeSocket, RealtimeSockets
from headrace.gateway.request_bodies import Bodies
from headrace.gateway.responses_socket import ResponseSocket, ResponseSockets
from headrace.gateway.web_socket import SocketProtocol
from headrace_common.config.settings import ServerConfig
from tests.gateway.builders import FakeGeneration
from tools.harness.eventually import settle

HANDSHAKE = (
    b"GET / HTTP/1.1\r\nHost: h\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)
CONT, TEXT, CLOSE, PING, PONG = 0, 1, 8, 9, 10
LARGEST = 100_000


def frame(opcode: int, payload: bytes = b"", is_last: bool = True) -> bytes:
    """Encode a client frame with a mask of zeros."""
    head, size = 0x80 * is_last | opcode, len(payload)
    length = bytes([0x80 | size]) if size < 126 else struct.pack("!BQ", 0x80 | 127, size)
    return bytes([head]) + length + bytes(4) + payload


class Wire(asyncio.Transport):
    """A fake transport that records written bytes and whether reading is paused."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = bytearray()
        self.is_paused = self.is_cut = False

    def write(self, data: Any) -> None:
        self.sent += data

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def is_closing(self) -> bool:
        return self.is_cut

    def abort(self) -> None:
        self.is_cut = True

    close = abort


class Listener:
    """An app that records all messages; it starts to receive them once `ready` is set."""

    def __init__(self) -> None:
        self.got: list[str] = []
        self.ready = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "websocket.accept"})
        await self.ready.wait()
        while (message := await receive())["type"] == "websocket.receive":
            self.got.append(message["text"])


Dial = Callable[[], tuple[SocketProtocol, Wire]]


@contextlib.asynccontextmanager
async def dialling(app: Listener) -> AsyncIterator[Dial]:
    """Yield a function that opens another socket of one server."""
    server = HttpServer(app, max_message_bytes=LARGEST)
    opened: list[SocketProtocol] = []

    def dial() -> tuple[SocketProtocol, Wire]:
        socket, wire = SocketProtocol(server.config, server.server_state, {}), Wire()
        socket.connection_made(wire)
        socket.data_received(HANDSHAKE)
        opened.append(socket)
        return socket, wire

    try:
        yield dial
    finally:
        app.ready.set()
        for socket in opened:
            socket.connection_lost(None)
        await asyncio.gather(*server.server_state.tasks)


async def test_many_frames_of_one_read_are_parsed_in_slices() -> None:
    app = Listener()
    async with dialling(app) as dial:
        socket, wire = dial()
        await settle()
        del wire.sent[:]
        socket.data_received(20_000 * frame(PING) + frame(TEXT, b"behind them"))
        assert len(wire.sent) < 2000 and wire.is_paused
        app.ready.set()
        while not app.got:
            await asyncio.sleep(0)
        await settle()
        assert wire.sent == 20_000 * bytes([0x80 | PONG, 0])
        assert app.got == ["behind them"] and not wire.is_paused


async def test_a_client_that_does_not_read_gets_only_the_last_pong() -> None:
    async with dialling(Listener()) as dial:
        socket, wire = dial()
        await settle()
        del wire.sent[:]
        socket.pause_writing()
        for number in range(1000):
            socket.data_received(frame(PING, b"%d" % number))
        assert not wire.sent
        socket.resume_writing()
        assert wire.sent == bytes([0x80 | PONG, 3]) + b"999"


async def test_any_number_of_fragments_make_one_message() -> None:
    app = Listener()
    async with dialling(app) as dial:
        socket, _ = dial()
        socket.data_received(frame(TEXT, b"a", is_last=False))
        for _ in range(100):
            socket.data_received(100 * (frame(CONT, b"", False) + frame(CONT, b"b", False)))
            while socket._parsing is not None:
                await asyncio.sleep(0)
        assert len(socket.frames) == 2
        socket.data_received(frame(CONT, b"c"))
        app.ready.set()
        await settle()
        assert app.got == ["a" + 10_000 * "b" + "c"]


@pytest.mark.parametrize("is_whole", [False, True])
async def test_the_socket_with_the_oldest_message_is_closed_beyond_the_limit(
    is_whole: bool,
) -> None:
    message = frame(TEXT, 90_000 * b"x")
    async with dialling(Listener()) as dial:
        wires: list[Wire] = []
        for _ in range(5):
            socket, wire = dial()
            await settle()
            del wire.sent[:]
            socket.data_received(message if is_whole else message[:-1])
            while socket._parsing is not None:
                await asyncio.sleep(0)
            wires.append(wire)
        assert [wire.is_cut for wire in wires] == [True, False, False, False, False]
        assert wires[0].sent[:4] == bytes([0x80 | CLOSE, 25]) + struct.pack("!H", 1013)


class Flood:
    """A fake socket on which 20,000 messages have arrived."""

    scope: Any = {"path": "/v1/realtime-text", "type": "websocket"}

    def __init__(self) -> None:
        self._num_left = 20_000

    async def receive(self) -> dict[str, Any]:
        self._num_left -= 1
        if self._num_left < 0:
            return {"type": "websocket.disconnect"}
        return {"type": "websocket.receive", "text": "{}"}

    async def send(self, message: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("sockets", "kind"), [(RealtimeSockets, RealtimeSocket), (ResponseSockets, ResponseSocket)]
)
async def test_other_tasks_run_between_the_messages_of_one_client(sockets: Any, kind: Any) -> None:
    config, generation = ServerConfig(), FakeGeneration()
    parts: Any = (config.streams, Auth(config.http), Bodies(1 << 20), None)
    serving = asyncio.create_task(kind(sockets(generation, *parts), Flood(), Headers()).run())
    num_turns = 0
    while not serving.done():
        await asyncio.sleep(0)
        num_turns += 1
    await serving
    assert num_turns > 10
