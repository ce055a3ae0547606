"""Two keys that compete: a single request of one key does not wait for all of the other's."""

import asyncio

from detangle import randint

from stress.simulated_server.clients.common import post_until_accepted
from stress.simulated_server.clients.events import check, read_events
from stress.simulated_server.http import API_KEY, CLIENT_KEYS
from stress.simulated_server.processes import MAX_NUM_SEQS
from stress.simulated_server.requests import Request
from stress.simulated_server.system import world_loop
from stress.simulated_server.world import World


async def asks_beside_many(world: World, request: Request) -> None:
    """Send many requests with one key, then one with another key, which must soon get its turn."""
    if not world.machine.config.http.api_key:
        return
    crowd_key, single_key = CLIENT_KEYS
    crowd = [
        asyncio.create_task(_first_token_at(world, world.new_request(), crowd_key))
        for _ in range(randint(6, 10))
    ]
    await asyncio.sleep(0.5)
    happened = world.troubles()
    accepted_at, first_at = await _first_token_at(world, request, single_key)
    is_calm = happened == world.troubles()
    others = [first for _, first in await asyncio.gather(*crowd)]
    if not is_calm or first_at is None:
        return
    num_before = sum(at is not None and accepted_at < at < first_at for at in others)
    assert num_before <= MAX_NUM_SEQS, (
        f"{request.key} waited {first_at - accepted_at:.1f} s, while {num_before} requests of "
        "another key began"
    )
    world.counts["turns beside many requests"] += 1


async def _first_token_at(world: World, request: Request, key: str) -> tuple[float, float | None]:
    """Return when the request was accepted, and when its first token was written."""
    API_KEY.set(key)
    stream_id = await post_until_accepted(world, request)
    accepted_at = world_loop().time()
    events = await read_events(world, request, stream_id)
    check(world, request, events)
    first = next((event["at_ms"] for event in events if event["kind"] == "tokens"), None)
    return accepted_at, None if first is None else accepted_at + first / 1000
