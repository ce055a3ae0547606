"""Readers of /v1/durable: pages, long polls and server-sent events of Durable Streams."""

import json

from detangle import choice, flip, randint

from headrace.gateway.durable_routes import LONG_POLL_S
from stress.simulated_server.clients.common import Backoff, Event, frames, post_until_accepted
from stress.simulated_server.clients.events import add, check
from stress.simulated_server.http import Broken, Connection, connect
from stress.simulated_server.requests import Request
from stress.simulated_server.world import SILENCE_S, World


class DurableReader:
    """Reads one stream; each read uses another mode of the protocol."""

    def __init__(self, world: World, stream_id: str) -> None:
        self._world = world
        self._target = f"/v1/durable/{stream_id}"
        self._offset = "-1"
        self._is_closed = False
        self.events: list[Event] = []
        world.reads.append((stream_id, self.events))

    async def read(self) -> None:
        backoff = Backoff()
        while not self._is_closed:
            before = self._offset
            try:
                await self._read_once(choice(("", "long-poll", "sse")))
            except Broken:
                await backoff.pause()
            if self._offset == before:
                await backoff.pause()

    async def _read_once(self, live: str) -> None:
        target = f"{self._target}?offset={self._offset}" + (f"&live={live}" if live else "")
        connection = connect(self._world.server, "GET", target, {})
        limit_s = SILENCE_S + (LONG_POLL_S if live == "long-poll" else 0.0)
        status = await self._world.in_time(connection, connection.begin(), limit_s)
        if status not in (200, 204):
            answer = await connection.read()
            assert status in (429, 503), f"{target}: {status} {answer!r}"
            raise Broken
        if live == "sse":
            await self._take_events(connection)
            return
        if status == 200:
            self._take(await self._world.in_time(connection, connection.read()))
        is_closed = connection.headers.get("stream-closed") == "true"
        self._move(connection.headers["stream-next-offset"], is_closed)

    async def _take_events(self, connection: Connection) -> None:
        num_left = randint(0, 20) if flip(0.3) else None
        async for name, data in frames(self._world, connection):
            if name == "data":
                self._take(data)
            elif name == "control":
                control = json.loads(data)
                self._move(control["streamNextOffset"], control.get("streamClosed", False))
                if num_left is not None and (num_left := num_left - 1) < 0:
                    self._world.faults.note("client: connection cut")
                    connection.close()
                    raise Broken

    def _take(self, messages: bytes) -> None:
        # A page may arrive whole although the offset behind it does not: then it comes again.
        start = max(0, int(self._offset))
        del self.events[start:]
        for event in json.loads(messages):
            add(self.events, event)

    def _move(self, offset: str, is_closed: bool) -> None:
        assert int(offset) == len(self.events), f"offset {offset} after {len(self.events)} events"
        assert offset >= self._offset or self._offset == "-1", f"{offset} after {self._offset}"
        self._offset, self._is_closed = offset, is_closed


async def resumes_durably(world: World, request: Request) -> None:
    """Read a stream with Durable Streams, continuing at the offset after each break."""
    reader = DurableReader(world, await post_until_accepted(world, request))
    await reader.read()
    check(world, request, reader.events)
    world.counts["streams read durably"] += 1
