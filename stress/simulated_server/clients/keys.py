"""Clients that use one idempotency key several times: at once, after the end, and wrongly."""

import asyncio
import json

from detangle import choice, randint, uniform

from stress.simulated_server.clients.common import (
    CHAT,
    Backoff,
    names_of,
    post_until_accepted,
    refused,
)
from stress.simulated_server.clients.events import check, read_events
from stress.simulated_server.http import Broken, connect
from stress.simulated_server.requests import Request
from stress.simulated_server.world import World


async def shares_a_key(world: World, request: Request) -> None:
    """Send a request several times at once and again after its end: one answer is computed."""
    posts = [_posts(world, request) for _ in range(randint(2, 4))]
    ids = dict.fromkeys(await asyncio.gather(*posts))
    logs = {id: await read_events(world, request, id) for id in ids}
    for events in logs.values():
        check(world, request, events)
    # A key is free again if its stream has failed.
    whole = [id for id, events in logs.items() if events[-1]["kind"] == "finish"]
    assert len(whole) <= 1, f"{request.key} has several answers: {whole}"
    if not whole or world.expires:
        return
    again = await _posts(world, request)
    assert again == whole[0], f"{request.key} is computed again: {whole[0]} and {again}"
    await _asks_differently(world, request)
    world.counts["keys used again"] += 1


async def _posts(world: World, request: Request) -> str:
    """Send the request after a short time. Many answers take less than half a second."""
    await asyncio.sleep(uniform(0.0, choice((0.01, 0.1, 0.5))))
    return await post_until_accepted(world, request)


async def _asks_differently(world: World, request: Request) -> None:
    """Send another request with the key of a stored stream; the server must refuse it."""
    body = request.body(is_stream=True, seed=request.seed + 1)
    backoff = Backoff()
    while True:
        try:
            connection = connect(world.server, "POST", CHAT, names_of(request), body)
            status = await connection.begin()
            assert status != 200, f"{request.key} got the answer of another request"
            if status == 409:
                code = json.loads(await connection.read())["error"]["code"]
                assert code == "idempotency_key_reused", f"{request.key}: {code}"
                return
            await refused(world, connection)
        except Broken:
            pass
        await backoff.pause()
