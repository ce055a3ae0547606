"""The target of an attack: a server's port, and checks of every answer from it."""

import asyncio
import contextlib
import functools
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path

import msgspec

from headrace_common.errors import KINDS
from stress.http import CHUNK, KEPT, Call, Reply, Talk
from stress.site import Site

MAX_BODY = 32 << 20
_OWN_WORDS = {code for code, kind in KINDS.items() if kind.status == 500} - {"internal_error"}
"""Error codes with status 500 for which the server knows the reason, such as a damaged record."""


class Manner(msgspec.Struct, frozen=True):
    """How a client sends a request and what it accepts.

    `expects`: "any", "refusal" (4xx), "good" (200), or "rude". A "rude" client sends something that
    is not valid HTTP, so the server may answer anything or disconnect.
    """

    expects: str = "any"
    num_answers: int = 1
    # Seconds between two pieces.
    pause_s: float = 0.0
    within_s: float = 10.0
    # The client resets the connection after this many bytes of the answer.
    cut_after: int | None = None
    half_closes: bool = False
    has_bodies: bool = True


PLAIN = Manner()


class Target:
    """A server under attack. `fail` receives each problem.

    `num_each` scales the number of requests that one client sends in an attack.
    """

    def __init__(
        self,
        site: Site,
        label: str,
        folder: Path,
        num_each: int,
        fail: Callable[[str], None],
    ) -> None:
        self.site = site
        self.folder = folder
        self.num_each = num_each
        self.fail = fail
        self.statuses: Counter[str] = Counter()
        # Measured values that are printed with the attack's result.
        self.notes: list[str] = []
        self.label = label

    def rng(self, client: int = 0) -> random.Random:
        return random.Random(f"{self.label}/{client}")

    async def ask(self, call: Call, manner: Manner = PLAIN) -> Reply:
        """Sends a valid request; returns an empty reply if no answer arrived."""
        talk = await self.talk([call.raw()], manner)
        return talk.first

    async def talk(self, pieces: Iterable[bytes], manner: Manner = PLAIN) -> Talk:
        """Sends the pieces over one connection and judges the answers; never raises."""
        talk = Talk(manner.has_bodies, KEPT)
        sent = bytearray()
        try:
            async with asyncio.timeout(manner.within_s):
                await self._converse(talk, pieces, manner, sent)
        except TimeoutError:
            talk.end = "silent"
        except ConnectionRefusedError:
            talk.end = "refused"
        except OSError:
            talk.end = "reset"
        self._judge(talk, manner, bytes(sent))
        return talk

    async def _converse(
        self, talk: Talk, pieces: Iterable[bytes], manner: Manner, sent: bytearray
    ) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.site.port)
        sending = asyncio.create_task(_send(writer, pieces, manner, sent))
        try:
            while not talk.has(manner.num_answers) and not talk.problem:
                if manner.cut_after is not None and talk.num_bytes >= manner.cut_after:
                    talk.end = "cut"
                    return
                piece = await reader.read(CHUNK)
                if not piece:
                    talk.end = "closed"
                    return
                talk.feed(piece)
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            writer.transport.abort()

    def _judge(self, talk: Talk, manner: Manner, sent: bytes) -> None:
        for answer in talk.answers:
            self.statuses[f"{answer.status} {answer.code}".strip()] += 1
            if problem := _problem(answer, manner):
                self.fail(f"{_shown(sent)}: {problem}")
        if talk.problem and manner.expects != "rude":
            self.fail(f"{_shown(sent)}: no HTTP, {talk.problem}")
        if not talk.answers:
            self.statuses[talk.end] += 1
            is_owed = manner.expects != "rude" and not manner.half_closes
            if is_owed and talk.end in ("closed", "reset", "refused"):
                self.fail(f"{_shown(sent)}: {talk.end} without an answer")


Attack = Callable[[Target], Awaitable[None]]


def by_clients(
    number: int,
) -> Callable[[Callable[[Target, random.Random], Awaitable[None]]], Attack]:
    """Return a decorator that runs `number` clients at a time, each with its own random numbers."""

    def attack_of(live: Callable[[Target, random.Random], Awaitable[None]]) -> Attack:
        @functools.wraps(live)
        async def attack(target: Target) -> None:
            await asyncio.gather(*(live(target, target.rng(n)) for n in range(number)))

        return attack

    return attack_of


def _shown(sent: bytes) -> str:
    """Return the request line and the start of the body."""
    head, _, body = sent.partition(b"\r\n\r\n")
    return f"{head.partition(b' HTTP/')[0][:160].decode('latin-1')} {body[:240]!r}"


async def _send(
    writer: asyncio.StreamWriter, pieces: Iterable[bytes], manner: Manner, sent: bytearray
) -> None:
    for piece in pieces:
        sent += piece[: 400 - len(sent)] if len(sent) < 400 else b""
        # The server may refuse a request and disconnect before the whole body is sent.
        with contextlib.suppress(OSError):
            writer.write(piece)
            await writer.drain()
        if manner.pause_s:
            await asyncio.sleep(manner.pause_s)
    if manner.half_closes:
        with contextlib.suppress(OSError):
            writer.write_eof()


def _problem(answer: Reply, manner: Manner) -> str:
    """Return the fault of an answer, or an empty string."""
    status, shown = answer.status, f"{answer.status} {bytes(answer.body[:200])!r}"
    has_id = "x-request-id" in answer.headers
    is_text = answer.headers.get("content-type", "").startswith("text/plain")
    if manner.expects == "rude" and is_text and not has_id:
        # The HTTP parser itself wrote this answer; the parser only answers with status 400.
        return "" if status == 400 else shown
    if status and not has_id:
        return f"no X-Request-Id on {shown}"
    if status >= 500 and status != 503 and answer.code not in _OWN_WORDS:
        return shown
    if b'"code":"internal_error"' in answer.body:
        return f"an internal error in {shown}"
    if manner.expects == "refusal" and status and not 400 <= status < 500 and status != 503:
        return f"not refused: {shown}"
    if manner.expects == "good" and status not in (0, 200):
        return f"refused: {shown}"
    is_json = answer.headers.get("content-type") == "application/json"
    if is_json and answer.is_whole and 0 < answer.num_bytes < KEPT:
        try:
            msgspec.json.decode(answer.body)
        except msgspec.DecodeError as error:
            return f"not JSON, {error}: {shown}"
    return ""


def post(route: str, body: bytes, *headers: tuple[str, str]) -> Call:
    return Call("POST", route, body, headers)


async def until(condition: Callable[[], bool], within_s: float) -> bool:
    """Waits for the condition; returns False if it does not become true in time."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.02)
    return True
