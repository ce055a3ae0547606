"""Sends HTTP over connections that may break at any byte, and records everything that happens."""

import asyncio
import contextlib
import re
import time
from collections.abc import Callable
from typing import Any

import httptools
import msgspec

from stress.witness import Passage, Proxy

SILENCE_S = 60.0
# An unstreamed answer is silent until its end, even if the engine is restarted several times.
WHOLE_S = 600.0
# If a body is longer, only its length is recorded.
KEPT = 1 << 20
CHUNK = 1 << 16
_ID = re.compile(rb"^id: ([^:\n]+):", re.MULTILINE)


class Call(msgspec.Struct, frozen=True):
    """A request to send. `start` is the byte or cursor after which the answer must continue.

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
    """The part of an answer that has arrived. `is_whole` is set when the end has arrived."""

    def __init__(self) -> None:
        # The status is 0 until the head is complete.
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = bytearray()
        self.num_bytes = 0
        self.is_whole = False

    @classmethod
    def of(cls, raw: bytes) -> "Reply":
        talk = Talk()
        talk.feed(raw)
        return talk.first

    @property
    def stream_id(self) -> str | None:
        """The stream's id, from the head or from the first frame that has one.

        The head has no id if the model had to be loaded first.
        """
        if named := self.headers.get("x-stream-id"):
            return named
        found = _ID.search(self.body)
        return found[1].decode() if found else None

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.body)

    @property
    def code(self) -> str:
        """The code of the answer's error; empty if there is none."""
        with contextlib.suppress(msgspec.DecodeError, TypeError, KeyError, AttributeError):
            return str(self.json["error"]["code"])
        return ""


class Talk:
    """All answers on one connection, and how the connection ended."""

    def __init__(self, has_bodies: bool = True, max_kept: float = float("inf")) -> None:
        self.answers: list[Reply] = []
        self.num_bytes = 0
        # One of: waiting, closed, reset, refused, cut (by this client), silent (this client gave
        # up).
        self.end = "waiting"
        # Why the received bytes are not valid HTTP.
        self.problem = ""
        self._has_bodies = has_bodies
        self._max_kept = max_kept
        self._parser = httptools.HttpResponseParser(self)

    @property
    def first(self) -> Reply:
        """The first answer, or an empty one if none arrived."""
        return self.answers[0] if self.answers else Reply()

    def feed(self, piece: bytes) -> None:
        self.num_bytes += len(piece)
        try:
            self._parser.feed_data(piece)
        except httptools.HttpParserUpgrade:
            pass
        except httptools.HttpParserError as error:
            # The answer to HEAD states the length of a body that is not sent.
            if self._has_bodies:
                self.problem = f"{error}: {piece[:80]!r}"

    def has(self, number: int) -> bool:
        whole = [a for a in self.answers if a.is_whole or (a.status and not self._has_bodies)]
        return len(whole) >= number

    def on_message_begin(self) -> None:
        self.answers.append(Reply())

    def on_header(self, name: bytes, value: bytes) -> None:
        self.answers[-1].headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self.answers[-1].status = self._parser.get_status_code()

    def on_body(self, piece: bytes) -> None:
        answer = self.answers[-1]
        answer.num_bytes += len(piece)
        if len(answer.body) < self._max_kept:
            answer.body += piece

    def on_message_complete(self) -> None:
        # This is the interim answer to "Expect: 100-continue"; the final answer follows.
        if self.answers[-1].status == 100:
            self.answers.pop()
        else:
            self.answers[-1].is_whole = True


class Exchange:
    """A call, what the client received, and what the proxy saw."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.began = time.monotonic()
        self.ended = self.began
        self.talk = Talk()
        # Set if the client gave up waiting.
        self.is_silent = False
        # None if the connection was refused.
        self.passage: Passage | None = None

    @property
    def got(self) -> Reply:
        return self.talk.first

    @property
    def said(self) -> Reply:
        """The answer that the server wrote, whether or not it reached the client."""
        return Reply.of(bytes(self.passage.answer)) if self.passage else self.got

    def line(self) -> str:
        fate = self.passage.fate if self.passage else None
        cut = f"{fate.cut}@{fate.after_bytes}" if fate and self.passage.was_cut else "-"  # type: ignore[union-attr]
        return (
            f"{self.call.method} {self.call.path} start={self.call.start} -> {self.got.status} "
            f"{self.got.stream_id} {len(self.got.body)} bytes "
            f"{'whole' if self.got.is_whole else 'broken'} cut={cut} "
            f"until {self.ended:.3f}{' SILENT' if self.is_silent else ''}{self.talk.problem}"
        )


async def exchange(
    road: Proxy | int, call: Call, on_head: Callable[[Reply], None] = lambda reply: None
) -> Exchange:
    """Sends a call through a proxy or to a port. The result records network errors."""
    made = Exchange(call)
    at = road if isinstance(road, int) else road.port
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", at)
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
        made.passage = None if isinstance(road, int) else road.passage(port)
        if made.passage is not None:
            await made.passage.done.wait()
    return made


async def _receive(
    reader: asyncio.StreamReader, made: Exchange, on_head: Callable[[Reply], None]
) -> None:
    was_told = False
    while not made.got.is_whole and not made.talk.problem:
        async with asyncio.timeout(made.call.silence_s):
            piece = await reader.read(CHUNK)
        if not piece:
            return
        made.talk.feed(piece)
        if made.got.status and not was_told:
            was_told = True
            on_head(made.got)
