"""A client that returns after its stream has expired, in runs that keep streams for minutes."""

import asyncio

from stress.simulated_server.clients.common import ask, post_until_accepted
from stress.simulated_server.clients.events import check, read_events
from stress.simulated_server.world import World

LATE_S = 200.0
"""Two sweeps and a stall of the disk may pass until an expired stream is deleted."""


async def returns_too_late(world: World) -> None:
    """Read a stream; it is gone after its time, and its key is free for a new stream."""
    if not world.expires:
        return
    request = world.new_request()
    stream_id = await post_until_accepted(world, request)
    check(world, request, await read_events(world, request, stream_id))
    keep_s = world.machine.config.streams.keep_streams_hours * 3600
    await asyncio.sleep(keep_s + LATE_S)
    await ask(world, "GET", f"/v1/streams/{stream_id}/events", allowed=(404,))
    world.counts["expired streams"] += 1
    again = await post_until_accepted(world, request)
    assert again != stream_id, f"{stream_id} came back"
    check(world, request, await read_events(world, request, again))
