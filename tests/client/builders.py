"""Events as bytes, a server that answers from a list, and a proxy that cuts."""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

STREAM = "chatcmpl-1"


def event(seq: int, kind: str, **more: Any) -> bytes:
    data = json.dumps({"kind": kind, "seq": seq, "at_ms": 0, **more})
    return f"id: {STREAM}:{seq}\nevent: {kind}\ndata: {data}\n\n".encode()


def accepted(mode: str = "fresh") -> bytes:
    known = {"id": STREAM, "model": "m", "mode": mode, "prompt_tokens": 3, "durable": True}
    return event(0, "accepted", **known, route="/v1/chat/completions", n=1, seed=1)


def tokens(seq: int, text: str) -> bytes:
    return event(seq, "tokens", choice=0, ids=[seq], pieces=[{"text": text}])


def finish(seq: int) -> bytes:
    return event(seq, "finish", ends=[], usage={}, timings={})


HEARTBEAT = b'event: heartbeat\ndata: {"kind":"heartbeat","state":"queued","form":"data"}\n\n'


class Given(NamedTuple):
    """An answer; `missing` bytes of it never come.

    If `is_held`, the connection stays open. An answer with status 0 has no byte.
    """

    status: int = 200
    body: bytes = b"{}"
    headers: dict[str, str] = {}
    missing: int = 0
    is_held: bool = False


class ListedServer(ThreadingHTTPServer):
    """Gives its answers in turn, the last one for ever."""

    def __init__(self, *answers: Given) -> None:
        super().__init__(("127.0.0.1", 0), _Listed)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.answers = list(answers)
        self.asked: list[str] = []
        self.released = threading.Event()


class _Listed(BaseHTTPRequestHandler):
    server: ListedServer

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.server.asked.append(f"{self.command} {self.path}")
        answers = self.server.answers
        given = answers.pop(0) if len(answers) > 1 else answers[0]
        if given.status:
            self.send_response(given.status)
            for name, value in given.headers.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(given.body) + given.missing))
            self.end_headers()
            self.wfile.write(given.body)
        if given.is_held:
            self.server.released.wait(60)

    do_POST = do_GET

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextlib.contextmanager
def listed_server(*answers: Given) -> Iterator[ListedServer]:
    with ListedServer(*answers) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.released.set()
        server.shutdown()


class CuttingProxy:
    """Passes bytes on to a server, and cuts each connection after `cut_after` bytes of answer."""

    def __init__(self, port: int, cut_after: int) -> None:
        self.num_connections = 0
        self._port, self._cut_after = port, cut_after
        self._loop = asyncio.new_event_loop()
        self._ours = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._ours.getsockname()[1]}"

    def run(self) -> None:
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._serve())

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(lambda: [t.cancel() for t in asyncio.all_tasks()])

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._pass_on, sock=self._ours)
        await server.serve_forever()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        theirs, to_them = await asyncio.open_connection("127.0.0.1", self._port)
        asking = asyncio.create_task(_copy(reader, to_them))
        await _copy(theirs, writer, self._cut_after)
        asking.cancel()
        for end in (writer, to_them):
            end.transport.abort()


async def _copy(source: asyncio.StreamReader, target: Any, limit: int = 1 << 40) -> None:
    with contextlib.suppress(OSError):
        while limit > 0 and (data := await source.read(min(limit, 1 << 16))):
            target.write(data)
            await target.drain()
            limit -= len(data)


@contextlib.contextmanager
def cutting_proxy(port: int, cut_after: int) -> Iterator[CuttingProxy]:
    proxy = CuttingProxy(port, cut_after)
    thread = threading.Thread(target=proxy.run, daemon=True)
    thread.start()
    yield proxy
    proxy.stop()
    thread.join(timeout=10)
