"""One HTTP request over one connection that may break anywhere; parses heads and bodies."""

import asyncio
import contextlib
import re
import time
from collections.abc import Callable

import httptools
import msgspec

from stress.chaos.witness import Passage, Proxy

SILENCE_S = 60.0
_ID = re.compile(rb"^id: ([^:\n]+):", re.MULTILINE)
WHOLE_S = 600.0  # an answer in one piece says nothing before, through several ends of the engine


class Call(msgspec.Struct, frozen=True):
    """What is sent. `start`: the byte, or the cursor, behind which the answer shall go on.

    `silence_s`: how long the client waits for the next byte before it gives up.
    """

    method: str
    path: str
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    start: int | str | None = None
    silence_s: float = SILENCE_S

    def raw(self) -> bytes:
        lines = [
            f"{self.method} {self.path} HTTP/1.1",
            "Host: 127.0.0.1",
            "Connection: close",
            *(f"{name}: {value}" for name, value in self.headers),
        ]
        if self.method == "POST":
            lines += ["Content-Type: application/json", f"Content-Length: {len(self.body)}"]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + self.body


class Reply:
    """As much of an answer as came. `is_whole`: its end was seen."""

    def __init__(self) -> None:
        self.status = 0  # until the head is complete
        self.headers: dict[str, str] = {}
        self.body = bytearray()
        self.is_whole = False
        self._parser = httptools.HttpResponseParser(self)

    @classmethod
    def of(cls, raw: bytes) -> "Reply":
        reply = cls()
        reply.feed(raw)
        return reply

    def feed(self, raw: bytes) -> None:
        with contextlib.suppress(httptools.HttpParserUpgrade):
            self._parser.feed_data(raw)

    @property
    def stream_id(self) -> str | None:
        """Of the head; where its model had to be loaded first, of the first frame with an id."""
        if named := self.headers.get("x-stream-id"):
            return named
        found = _ID.search(self.body)
        return found[1].decode() if found else None

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode().lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_body(self, piece: bytes) -> None:
        self.body += piece

    def on_message_complete(self) -> None:
        self.is_whole = True


class Exchange:
    """A call, what the client got, and what the witness saw on the way."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.began = time.monotonic()
        self.ended = self.began
        self.got = Reply()
        self.is_silent = False  # the client gave up waiting
        self.passage: Passage | None = None  # none if the connection was refused

    @property
    def said(self) -> Reply:
        """All that the server wrote, whether or not it arrived."""
        return Reply.of(bytes(self.passage.answer)) if self.passage else self.got

    def line(self) -> str:
        fate = self.passage.fate if self.passage else None
        cut = f"{fate.cut}@{fate.after_bytes}" if fate and self.passage.was_cut else "-"  # type: ignore[union-attr]
        return (
            f"{self.call.method} {self.call.path} start={self.call.start} -> {self.got.status} "
            f"{self.got.stream_id} {len(self.got.body)} bytes "
            f"{'whole' if self.got.is_whole else 'broken'} cut={cut} "
            f"until {self.ended:.3f}{' SILENT' if self.is_silent else ''}"
        )


async def exchange(
    proxy: Proxy, call: Call, on_head: Callable[[Reply], None] = lambda reply: None
) -> Exchange:
    """Never raises for what a network does; the exchange says how it went."""
    made = Exchange(call)
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    except OSError:
        made.ended = time.monotonic()
        return made
    port = writer.get_extra_info("sockname")[1]
    try:
        writer.write(call.raw())
        await _receive(reader, made, on_head)
    except OSError:
        pass
    except TimeoutError:
        made.is_silent = True
    finally:
        made.ended = time.monotonic()
        writer.transport.abort()
        made.passage = proxy.passage(port)
        if made.passage is not None:
            await made.passage.done.wait()
    return made


async def _receive(
    reader: asyncio.StreamReader, made: Exchange, on_head: Callable[[Reply], None]
) -> None:
    was_told = False
    while not made.got.is_whole:
        async with asyncio.timeout(made.call.silence_s):
            piece = await reader.read(1 << 16)
        if not piece:
            return
        made.got.feed(piece)
        if made.got.status and not was_told:
            was_told = True
            on_head(made.got)
