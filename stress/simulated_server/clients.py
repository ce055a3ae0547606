"""Clients of the OpenAI chat route: they resume, retry, read slowly and leave."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from detangle import choice, flip, randint, uniform

from stress.simulated_server.http import Broken, Connection, connect
from stress.simulated_server.requests import Request
from stress.simulated_server.world import World

Event = dict[str, Any]


class Backoff:
    """The pauses that the docs advise: a quarter of a second, doubled up to five seconds."""

    def __init__(self) -> None:
        self._seconds = 0.25

    async def pause(self) -> None:
        await asyncio.sleep(self._seconds)
        self._seconds = min(5.0, 2 * self._seconds)


async def asks_for_a_while(world: World) -> None:
    """Send a few requests, each as another kind of client."""
    for _ in range(randint(1, 3)):
        await asyncio.sleep(uniform(0.0, 8.0))
        kind = choice((resumes_by_event, repeats_the_request, leaves))
        await kind(world, world.new_request())


async def resumes_by_event(world: World, request: Request) -> None:
    """Read the log of an opted-in stream; continue behind the last event after each break."""
    stream_id = await post_until_accepted(world, request)
    events: list[Event] = []
    backoff = Backoff()
    while not (events and events[-1]["kind"] in ("finish", "error")):
        target = f"/v1/streams/{stream_id}/events"
        if events:
            target += f"?after={len(events) - 1}"
        try:
            connection = connect(world.server, "GET", target, {})
            status = await world.in_time(connection, connection.begin())
            assert status != 204, "the log has ended without a last event"
            if status != 200:
                assert status in (429, 503), f"{request.key}: status {status} for a stored stream"
                raise Broken
            await _read_some(world, connection, events)
        except Broken:
            await backoff.pause()
    _check(world, request, events)


async def _read_some(world: World, connection: Connection, events: list[Event]) -> None:
    """Append new events; sometimes read slowly, and sometimes break the connection."""
    num_left = randint(0, 40) if flip(0.3) else None
    async for event in server_sent_events(world, connection):
        # Notices and most heartbeats belong to the connection and not to the log.
        if "seq" not in event:
            continue
        assert event["seq"] == len(events), f"event {event['seq']} after {len(events) - 1}"
        events.append(event)
        if flip(0.05):
            await asyncio.sleep(uniform(0.0, 10.0))
        if num_left is not None:
            num_left -= 1
            if num_left < 0:
                world.faults.note("client: connection cut")
                connection.close()
                raise Broken


async def server_sent_events(world: World, connection: Connection) -> AsyncIterator[Event]:
    rest = b""
    chunks = connection.chunks()
    while True:
        try:
            piece = await world.in_time(connection, anext(chunks))
        except StopAsyncIteration:
            return
        *frames, rest = (rest + piece).split(b"\n\n")
        for frame in frames:
            lines = frame.split(b"\n")
            data = b"".join(it[6:] for it in lines if it.startswith(b"data: "))
            kind = next((it[7:] for it in lines if it.startswith(b"event: ")), b"")
            if data:
                yield {"kind": kind.decode(), **json.loads(data)}


def _check(world: World, request: Request, events: list[Event]) -> None:
    last = events[-1]
    if last["kind"] == "error":
        assert world.may_fail(last["code"]), f"{request.key} failed without a reason: {last}"
        world.counts["allowed failures"] += 1
        return
    text = "".join(piece["text"] for event in events for piece in event.get("pieces", ()))
    world.compare(request, text, last["ends"][0]["finish_reason"])


def post(world: World, request: Request, is_stream: bool, **headers: str) -> Connection:
    given = {"idempotency-key": request.key, **headers}
    body = request.body(is_stream)
    return connect(world.server, "POST", "/v1/chat/completions", given, body)


async def post_until_accepted(world: World, request: Request) -> str:
    """POST with a key until the server accepts; return the stream's id."""
    backoff = Backoff()
    while True:
        try:
            connection = post(world, request, is_stream=True)
            status = await connection.begin()
            if status == 200:
                connection.close()
                return connection.headers["x-stream-id"]
            body = await connection.read()
            assert status in (429, 503), f"{request.key}: {status} {body!r}"
        except Broken:
            pass
        await backoff.pause()


async def repeats_the_request(world: World, request: Request) -> None:
    """Repeat a POST with a key until a whole answer arrives."""
    backoff = Backoff()
    while True:
        try:
            connection = post(world, request, is_stream=False)
            body = await connection.read()
            if connection.status == 200:
                found = json.loads(body)["choices"][0]
                world.compare(request, found["message"]["content"], found["finish_reason"])
                return
            code = json.loads(body)["error"]["code"]
            if connection.status not in (429, 503):
                assert world.may_fail(code), f"{request.key}: {connection.status} {body!r}"
                world.counts["allowed failures"] += 1
                return
        except Broken:
            pass
        await backoff.pause()


async def leaves(world: World, request: Request) -> None:
    """Begin to read a stream without a key, and leave."""
    num_left = randint(0, 10)
    try:
        body = request.body(is_stream=True)
        connection = connect(world.server, "POST", "/v1/chat/completions", {}, body)
        await connection.begin()
        async for _ in connection.chunks():
            num_left -= 1
            if num_left < 0:
                break
        world.faults.note("client: left")
        connection.close()
    except Broken:
        pass
