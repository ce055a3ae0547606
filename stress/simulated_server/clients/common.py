"""Parts that several kinds of clients share: pauses, server-sent events, POSTs with a key."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from headrace.intake.intake import CONVERSATION, KEY
from stress.simulated_server.http import Broken, Connection, connect
from stress.simulated_server.requests import Request
from stress.simulated_server.world import World

Event = dict[str, Any]

CHAT = "/v1/chat/completions"


class Backoff:
    """The pauses that the docs advise: a quarter of a second, doubled up to five seconds."""

    def __init__(self) -> None:
        self._seconds = 0.25

    async def pause(self) -> None:
        await asyncio.sleep(self._seconds)
        self._seconds = min(5.0, 2 * self._seconds)


async def frames(world: World, connection: Connection) -> AsyncIterator[tuple[str, bytes]]:
    """Yield the name and the data of each server-sent event; comments have no data."""
    rest = b""
    chunks = connection.chunks()
    while True:
        try:
            piece = await world.in_time(connection, anext(chunks))
        except StopAsyncIteration:
            return
        *whole, rest = (rest + piece).split(b"\n\n")
        for frame in whole:
            yield read_frame(frame)


def read_frame(frame: bytes) -> tuple[str, bytes]:
    """Return the name and the data of one server-sent event."""
    name, data = "", []
    for line in frame.split(b"\n"):
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"event":
            name = value.decode()
        elif field == b"data":
            data.append(value)
    return name, b"\n".join(data)


async def server_sent_events(world: World, connection: Connection) -> AsyncIterator[Event]:
    async for name, data in frames(world, connection):
        if data:
            yield {"kind": name, **json.loads(data)}


def names_of(request: Request, conversation: str = "") -> dict[str, str]:
    """Return the headers that make a stream independent of its connection."""
    names = {KEY: request.key}
    return names | {CONVERSATION: conversation} if conversation else names


def post(world: World, request: Request, is_stream: bool, **headers: str) -> Connection:
    given = {KEY: request.key, **headers}
    return connect(world.server, "POST", CHAT, given, request.body(is_stream))


async def post_until_accepted(
    world: World, request: Request, route: str = CHAT, body: Any = None, conversation: str = ""
) -> str:
    """POST with a key until the server accepts; return the stream's id."""
    backoff = Backoff()
    body = request.body(is_stream=True) if body is None else body
    while True:
        try:
            names = names_of(request, conversation)
            connection = connect(world.server, "POST", route, names, body)
            status = await connection.begin()
            if status == 200:
                connection.close()
                return connection.headers["x-stream-id"]
            await refused(world, connection)
        except Broken:
            pass
        await backoff.pause()


async def refused(world: World, connection: Connection) -> None:
    """Read a refusal, and check that the client may send the request again."""
    answer = await connection.read()
    if connection.status not in (429, 503, 529):
        name = connection.task.get_name()
        assert world.may_fail(code_of(answer)), f"{name}: {connection.status} {answer!r}"
        world.counts["allowed refusals"] += 1


def code_of(answer: bytes) -> str:
    """Return the error code in an answer."""
    assert answer.startswith(b"{"), f"not a JSON object: {answer!r}"
    shown = json.loads(answer)
    error = shown["error"]
    code: str = error["code"] if isinstance(error, dict) else shown["code"]
    return code


async def ask(
    world: World, method: str, target: str, allowed: tuple[int, ...] = (200,)
) -> tuple[int, bytes]:
    """Send a request without a body until it gets an allowed status."""
    backoff = Backoff()
    while True:
        try:
            connection = connect(world.server, method, target, {})
            answer = await connection.read()
            if connection.status in allowed:
                return connection.status, answer
            code = code_of(answer)
            is_known = connection.status in (429, 503, 529) or is_later(world, code)
            assert is_known or world.may_fail(code), (
                f"{method} {target}: {connection.status} {answer!r}"
            )
        except Broken:
            pass
        await backoff.pause()


def is_later(world: World, code: str) -> bool:
    """Return whether an error only ends this connection, so that the client asks again later."""
    return code in (
        "server_restarting",
        "server_shutdown",
        "storage_stalled",
        "storage_unavailable",
        "server_overloaded",
        "queue_timeout",
        "conversation_locked",
    )


def allow_failure(world: World, request: Request, code: str) -> None:
    """Check that a stream may end with this error."""
    assert world.may_fail(code), f"{request.key} failed without a reason: {code}"
    world.counts["allowed failures"] += 1
