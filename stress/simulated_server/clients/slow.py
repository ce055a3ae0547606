"""Clients that send a request and do not read the answer for a long time."""

import asyncio

from detangle import choice, flip, uniform

from stress.simulated_server.clients.common import allow_failure, is_later, names_of
from stress.simulated_server.clients.dialects import DIALECTS, check, parse
from stress.simulated_server.clients.events import check as check_events
from stress.simulated_server.clients.events import read_events
from stress.simulated_server.http import Broken, connect
from stress.simulated_server.requests import Request
from stress.simulated_server.world import World


async def reads_late(world: World, request: Request) -> None:
    """Leave an answer unread for a while; then read it whole on the same connection, or leave.

    A stream with a key does not depend on this connection.
    """
    dialect = choice(DIALECTS)
    names = names_of(request) if flip(0.5) else {}
    stream_id = ""
    try:
        connection = connect(
            world.server, "POST", dialect.route, names, dialect.body(request, True)
        )
        if await connection.begin() != 200:
            return
        stream_id = connection.headers["x-stream-id"]
        world.faults.note("client: reads nothing")
        await asyncio.sleep(uniform(1.0, 120.0))
        if flip(0.3):
            connection.close()
            raise Broken
        parsed = parse(dialect, await connection.read())
        if is_later(world, parsed.code):
            raise Broken
        if parsed.code:
            allow_failure(world, request, parsed.code)
        elif parsed.is_done:
            check(world, request, dialect, parsed)
            world.counts["answers read late"] += 1
    except Broken:
        pass
    if names and stream_id:
        check_events(world, request, await read_events(world, request, stream_id))
