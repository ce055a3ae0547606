"""Connections as clients treat them: several requests at once, and gone before the answer."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from headrace.core.config import HttpConfig, ServerConfig
from headrace.gateway.app import create_app
from headrace.gateway.delivery import while_connected
from headrace.gateway.http_server import HttpServer
from tests.gateway.builders import FakeGeneration, in_loop

POST = b"POST /wait HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\n{}"
STREAM = b"GET /stream HTTP/1.1\r\nHost: h\r\n\r\n"
GET = b"GET /quick HTTP/1.1\r\nHost: h\r\n\r\n"


Connection = tuple[Any, asyncio.StreamReader, asyncio.StreamWriter]


class Paths:
    """Answers /quick at once, /wait when `released`, and /stream piece by piece for ever."""

    def __init__(self) -> None:
        self.begun: asyncio.Queue[str] = asyncio.Queue()
        self.left: asyncio.Queue[str] = asyncio.Queue()
        self.released = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        path = scope["path"]
        self.begun.put_nowait(path)
        while path == "/wait" and (await receive())["more_body"]:
            pass
        if path == "/wait" and await while_connected(receive, self.released.wait()) is None:
            self.left.put_nowait(path)
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if path == "/stream":
            await while_connected(receive, self._stream(send))
            self.left.put_nowait(path)
        await send({"type": "http.response.body", "body": b"done"})

    async def _stream(self, send: Any) -> None:
        while True:
            await send({"type": "http.response.body", "body": b"more", "more_body": True})
            await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def served(app: Any) -> AsyncIterator[Connection]:
    """The application, and a connection to it."""
    server = HttpServer(app, farewell_s=1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.create_task(server.serve([listener]))
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        try:
            async with asyncio.timeout(20):
                yield app, reader, writer
        finally:
            writer.close()
            server.should_exit = True
            await serving


@pytest.mark.parametrize("request_", [POST, STREAM])
@in_loop
async def test_requests_behind_a_running_one_do_not_hide_that_the_client_left(
    request_: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with served(Paths()) as (app, _, writer):
        writer.write(request_)
        path = await app.begun.get()
        writer.write(2 * GET)
        await writer.drain()
        writer.close()
        assert await app.left.get() == path
    assert app.begun.empty()
    assert not caplog.records


@in_loop
async def test_requests_sent_at_once_are_answered_in_turn() -> None:
    async with served(Paths()) as (app, reader, writer):
        writer.write(POST + 2 * GET)
        app.released.set()
        for _ in range(3):
            assert b"200 OK" in await reader.readuntil(b"0\r\n\r\n")


@pytest.mark.parametrize("too_much", [1000 * GET, POST.replace(b": 2", b": 99999") + 99997 * b" "])
@in_loop
async def test_a_client_that_sends_too_far_ahead_is_answered_and_cut(too_much: bytes) -> None:
    async with served(Paths()) as (app, reader, writer):
        writer.write(POST)
        await app.begun.get()
        writer.write(too_much)
        await writer.drain()
        app.released.set()
        assert b"connection: close" in await reader.readuntil(b"0\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == b""
    assert app.begun.empty()


@in_loop
async def test_a_client_whose_upload_is_too_large_reads_why() -> None:
    config = ServerConfig(http=HttpConfig(max_body_bytes=1000))
    async with served(create_app(FakeGeneration(), config)) as (_, reader, writer):  # type: ignore[arg-type]
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n")
        writer.write(b"Content-Type: application/json\r\nContent-Length: 500000\r\n\r\n")
        assert b" 413 " in await reader.readuntil(b"\r\n\r\n")
        for _ in range(10):
            writer.write(50_000 * b" ")
            await writer.drain()
        assert b"request_too_large" in await reader.read()
