"""Readers of the log's events: they resume behind the last event, and read slowly or in pairs."""

import asyncio
from collections.abc import AsyncIterator

from detangle import flip, randint, uniform

from stress.simulated_server.clients.common import (
    Backoff,
    Event,
    allow_failure,
    post_until_accepted,
    server_sent_events,
)
from stress.simulated_server.http import Broken, Connection, connect
from stress.simulated_server.processes import MAX_NUM_SEQS
from stress.simulated_server.requests import Request
from stress.simulated_server.world import World

ENDS = ("finish", "error")
FIRST_TOKEN_MS = 2000
"""The longest wait for the first token while the engine has room."""


async def resumes_by_event(world: World, request: Request) -> None:
    """Read the log of an opted-in stream; continue behind the last event after each break."""
    if flip(0.3):
        request = request._replace(num_choices=2)
    stream_id = await post_until_accepted(world, request)
    is_free, troubles = _has_free_engine(world), world.troubles()
    events = await read_events(world, request, stream_id)
    check(world, request, events)
    if is_free and troubles == world.troubles():
        first_ms = next(it["at_ms"] for it in events if it["kind"] in ("tokens", *ENDS))
        assert first_ms < FIRST_TOKEN_MS, f"{request.key} waited {first_ms} ms for a free engine"
        world.counts["starts on a free engine"] += 1


def _has_free_engine(world: World) -> bool:
    """Return whether the engine can compute all streams and embeddings of the server at once."""
    if not world.has_steady_engine or world.server is None:
        return False
    users = world.server.generation.fleet.hosts.first.users
    return len(users._owners) <= MAX_NUM_SEQS and not world.machine.storage.trouble


async def reads_twice(world: World, request: Request) -> None:
    """Read one stream with two readers at a time: both see the same events."""
    stream_id = await post_until_accepted(world, request)
    one, other = await asyncio.gather(
        read_events(world, request, stream_id), read_events(world, request, stream_id)
    )
    assert one == other, f"{request.key}: two readers saw different events"
    world.counts["pairs of readers"] += 1
    check(world, request, one)


async def read_events(world: World, request: Request, stream_id: str) -> list[Event]:
    """Return all events of a stream; break the connection and read slowly now and then."""
    events: list[Event] = []
    world.reads.append((stream_id, events))
    backoff = Backoff()
    while not (events and events[-1]["kind"] in ENDS):
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
            if flip(0.3):
                await world.until_up()
                continue
        # A notice also ends a connection, and a client that came back at once would spin.
        await backoff.pause()
    return events


async def _read_some(world: World, connection: Connection, events: list[Event]) -> None:
    """Append new events; sometimes read slowly, and sometimes break the connection."""
    async for event in log_events(world, connection):
        add(events, event)
        if flip(0.05):
            await asyncio.sleep(uniform(0.0, 10.0))


async def log_events(world: World, connection: Connection) -> AsyncIterator[Event]:
    """Yield the events of a log. Sometimes cut the connection after a few events: raises Broken."""
    num_left = randint(0, 40) if flip(0.3) else None
    async for event in server_sent_events(world, connection):
        # Notices and most heartbeats belong to the connection and not to the log.
        if "seq" not in event:
            continue
        yield event
        if num_left is not None:
            num_left -= 1
            if num_left < 0:
                world.faults.note("client: connection cut")
                connection.close()
                raise Broken


def add(events: list[Event], event: Event) -> None:
    """Append an event of the log; no event may be missing or be repeated."""
    assert event["seq"] == len(events), f"event {event['seq']} after {len(events) - 1}"
    events.append(event)


def check(world: World, request: Request, events: list[Event]) -> None:
    """Compare a whole log with the reference."""
    last = events[-1]
    if last["kind"] == "error":
        allow_failure(world, request, last["code"])
        return
    assert len(last["ends"]) == request.num_choices
    for choice, end in enumerate(last["ends"]):
        world.compare(request, text_of(events, choice), end["finish_reason"], choice)


def text_of(events: list[Event], choice: int = 0) -> str:
    """Return the text of one choice so far."""
    tokens = (event for event in events if event["kind"] == "tokens")
    mine = (event for event in tokens if event["choice"] == choice)
    return "".join(piece["text"] for event in mine for piece in event.get("pieces", ()))
