"""Tests HTTP connections: pipelining, early disconnects, limits and malformed requests."""

import asyncio
import contextlib
import json
import re
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http import httptools_impl
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from headrace.gateway import http_server
from headrace.gateway.delivery import while_connected
from headrace.gateway.http_server import MAX_AHEAD, OTHER_DESCRIPTORS, Bounds, HttpServer
from headrace_common.config.settings import HttpConfig, ServerConfig
from tests.gateway.builders import FakeGeneration, FakeStream, app_of, tokens

POST = b"POST /wait HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\n{}"
STREAM = b"GET /stream HTTP/1.1\r\nHost: h\r\n\r\n"
GET = b"GET /quick HTTP/1.1\r\nHost: h\r\n\r\n"


Connection = tuple[Any, asyncio.StreamReader, asyncio.StreamWriter]


class Paths:
    """An app that answers /quick at once, /wait when `released`, and streams /stream for ever."""

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
async def served(app: Any, **bounds: Any) -> AsyncIterator[Connection]:
    """Serve the app and yield it with the reader and writer of one connection."""
    server = HttpServer(app, farewell_s=1, bounds=Bounds(**bounds))
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
async def test_a_disconnect_is_noticed_despite_pipelined_requests(
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


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
async def test_a_client_that_closes_only_its_sending_side_gets_its_answer(version: bytes) -> None:
    async with served(Paths()) as (app, reader, writer):
        writer.write(POST.replace(b"1.1", version))
        writer.write_eof()
        await app.begun.get()
        app.released.set()
        assert (await reader.read()).rpartition(b"\r\n\r\n")[0].count(b" 200 OK\r\n") == 1
    assert app.left.empty()


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
async def test_a_closed_connection_is_noticed_before_the_answer(
    version: bytes,
) -> None:
    async with served(Paths()) as (app, _, writer):
        writer.write(POST.replace(b"1.1", version))
        await app.begun.get()
        writer.close()
        assert await app.left.get() == "/wait"


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with served(Paths()) as (app, reader, writer):
        writer.write(POST + 2 * GET)
        app.released.set()
        for _ in range(3):
            assert b"200 OK" in await reader.readuntil(b"0\r\n\r\n")


@pytest.mark.parametrize("too_much", [1000 * GET, POST.replace(b": 2", b": 99999") + 99997 * b" "])
async def test_a_client_that_pipelines_too_much_is_answered_and_disconnected(
    too_much: bytes,
) -> None:
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


async def test_only_a_few_pipelined_requests_are_prepared_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Prepared(RequestResponseCycle):
        def __init__(self, **parts: Any) -> None:
            super().__init__(**parts)
            prepared.append(self)

    prepared: list[Prepared] = []
    monkeypatch.setattr(httptools_impl, "RequestResponseCycle", Prepared)
    async with served(Paths()) as (app, reader, writer):
        writer.write(POST + 1000 * GET)
        app.released.set()
        assert b"connection: close" in await reader.readuntil(b"0\r\n\r\n")
    assert len(prepared) < 2 * MAX_AHEAD


async def test_a_client_with_too_large_an_upload_can_read_the_error() -> None:
    config = ServerConfig(http=HttpConfig(max_body_bytes=1000))
    async with served(app_of(FakeGeneration(), config)) as (_, reader, writer):
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n")
        writer.write(b"Content-Type: application/json\r\nContent-Length: 500000\r\n\r\n")
        assert b" 413 " in await reader.readuntil(b"\r\n\r\n")
        for _ in range(10):
            writer.write(50_000 * b" ")
            await writer.drain()
        assert b"request_too_large" in await reader.read()


LARGE = 8 << 20  # bytes; more than the sockets' buffers hold


@pytest.mark.parametrize(
    "head",
    [
        b"POST /quick HTTP/1.1\r\nHost: h\r\nConnection: close\r\nContent-Length: %d\r\n\r\n"
        % LARGE,
        b"POST /quick HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % LARGE,
        b"no HTTP\r\n\r\n",
    ],
)
async def test_an_early_answer_reaches_a_client_that_is_still_sending(head: bytes) -> None:
    async with served(Paths()) as (_, reader, writer):
        writer.write(head + bytes(LARGE))
        await writer.drain()
        assert (await reader.read()).startswith(b"HTTP/1.1 ")


async def test_a_client_that_never_stops_sending_is_disconnected() -> None:
    async with served(Paths()) as (_, _, writer):
        writer.write(b"POST /quick HTTP/1.1\r\nHost: h\r\nConnection: close\r\n")
        writer.write(b"Content-Length: 1000000000000\r\n\r\n")
        with pytest.raises(ConnectionError):
            while True:
                writer.write(bytes(1 << 20))
                await writer.drain()


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.1\r\nX-Request-Id: mine\r\nX-Long: " + 70_000 * b"a",
        b"GET / HTTP/1.1\r\nX-Request-Id: mine\r\n" + 7000 * b"X-Short: a\r\n" + b"\r\n",
        b"GET /" + 70_000 * b"a" + b" HTTP/1.1\r\nX-Request-Id: mine\r\n\r\n",
    ],
)
async def test_too_large_headers_are_refused_with_a_json_error(sent: bytes) -> None:
    async with served(Paths()) as (app, reader, writer):
        writer.write(sent)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 431 Request Header Fields Too Large\r\n")
        assert b"connection: close" in head.lower()
        if not sent.startswith(b"GET /aa"):  # there, headers were never looked at
            assert b"x-request-id: mine" in head
        assert json.loads(body)["error"]["code"] == "headers_too_large"
    assert app.begun.empty()


@pytest.mark.parametrize(
    "sent",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01",
        b"HELLO\r\n\r\n",
        b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET /\r\n\r\n",
        b"GET /quick HTTP/0.9\r\n\r\n",
        b"GET /quick HTTP/2.0\r\nHost: h\r\n\r\n",
    ],
)
async def test_invalid_http_is_refused_with_a_request_id(sent: bytes) -> None:
    async with served(Paths()) as (_, reader, writer):
        writer.write(sent)
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
        assert re.search(rb"x-request-id: [0-9a-f]{32}\r\n", head)
        assert json.loads(body)["error"]["code"] == "invalid_http"


async def test_garbage_after_a_request_does_not_damage_its_answer() -> None:
    async with served(Paths()) as (app, reader, writer):
        writer.write(POST)
        await app.begun.get()
        writer.write(b"\x00\x01 garbage\r\n\r\n")
        await writer.drain()
        app.released.set()
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 200 OK") and answer.endswith(b"0\r\n\r\n")
        assert b"400" not in answer


async def test_an_invalid_chunk_in_a_body_ends_its_request() -> None:
    async with served(Paths()) as (app, reader, writer):
        writer.write(b"POST /wait HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n")
        await app.begun.get()
        writer.write(b"no size\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nX-Slow: a", GET + b"GET / HTTP/1.1\r\n"])
async def test_a_client_that_does_not_finish_its_headers_is_disconnected(sent: bytes) -> None:
    async with served(Paths(), head_s=0.2) as (_, reader, writer):
        writer.write(sent)
        answer = await reader.read()
        assert (b" 408 " in answer) == bool(sent)
        assert (b"headers_timeout" in answer) == bool(sent)


async def test_unfinished_headers_do_not_cut_off_the_previous_answer() -> None:
    async with served(Paths(), head_s=0.2) as (app, reader, writer):
        writer.write(POST + b"GET / HTTP/1.1\r\nX-Slow: a")
        await asyncio.sleep(0.5)
        app.released.set()
        answer = await reader.read()
        assert answer.endswith(b"0\r\n\r\n") and b" 408 " not in answer


async def test_an_idle_connection_is_closed_when_there_are_too_many() -> None:
    async with served(Paths(), connections=1) as (_, idle, writer):
        port = writer.get_extra_info("peername")[1]
        reader, newest = await asyncio.open_connection("127.0.0.1", port)
        assert await idle.read() == b""
        newest.write(GET)
        assert b"200 OK" in await reader.readline()
        newest.close()


async def test_a_client_that_reads_nothing_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "STALLED_S", 0.2)
    async with served(Paths()) as (app, _, writer):
        writer.write(STREAM)
        assert await app.left.get() == "/stream"  # it never read


async def test_a_client_that_reads_nothing_stops_being_a_reader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Kept(FakeGeneration):
        async def open(self, *given: Any, **named: Any) -> FakeStream:
            self.opened = await super().open(*given, **named)
            return self.opened

    monkeypatch.setattr(http_server, "STALLED_S", 0.2)
    generation = Kept(*(tokens(10_000 * "a", 5) for _ in range(6000)))  # more than sockets hold
    async with served(app_of(generation, ServerConfig())) as (_, reader, writer):
        body = b'{"prompt": "a", "stream": true}'
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n")
        writer.write(b"Content-Type: application/json\r\nContent-Length: 31\r\n\r\n" + body)
        assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
        while not generation.opened.num_left:
            await asyncio.sleep(0.01)
        with contextlib.suppress(ConnectionError):
            while await reader.read(1 << 20):
                pass
    assert len(generation.opened.sent) < 6000


def test_a_client_that_reads_slowly_is_not_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, cuts, due = [900, 400, 400], [], []
    connection = object.__new__(http_server._Connection)
    connection.transport = SimpleNamespace(  # type: ignore[assignment]
        get_write_buffer_size=lambda: sizes.pop(0), abort=lambda: cuts.append(len(sizes))
    )
    monkeypatch.setattr(http_server, "Countdown", lambda _, call: due.append(call))
    connection._watch_reading(1000)
    while due:
        due.pop()()
    assert cuts == [0]  # at the third look, by which nothing more was taken


def test_a_server_raises_its_limit_of_open_files() -> None:
    said = "print(resource.getrlimit(resource.RLIMIT_NOFILE))"
    for hard, taken in ((500, 500), (10_000, 1000 + OTHER_DESCRIPTORS)):
        lower = f"resource.setrlimit(resource.RLIMIT_NOFILE, (300, {hard}))"
        code = f"import resource; {lower}; "
        code += "from headrace.gateway import http_server; "
        code += f"http_server.raise_descriptors(1000); {said}"
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert run.stdout.strip() == str((taken, hard)), run.stderr


@pytest.mark.parametrize("has_length", [True, False])
async def test_an_http_1_0_answer_is_not_chunked_and_ends_with_the_connection(
    has_length: bool,
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-length", b"6")] if has_length else []
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for piece in (b"abc", b"def"):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async with served(app) as (_, reader, writer):
        writer.write(b"GET / HTTP/1.0\r\nHost: h\r\n\r\n")
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert body == b"abcdef" and b"transfer-encoding" not in head.lower()
