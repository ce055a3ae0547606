"""Two keys that compete: a single request of one key does not wait for all of the other's."""

import asyncio

from detangle import randint, uniform
from starlette.datastructures import Headers

from stress.simulated_server.clients.common import post_until_accepted
from stress.simulated_server.clients.events import check, read_events
from stress.simulated_server.http import API_KEY, CLIENT_KEYS
from stress.simulated_server.processes import MAX_NUM_SEQS
from stress.simulated_server.requests import Request
from stress.simulated_server.system import world_loop
from stress.simulated_server.world import World

MORE_STEPS = 10
"""Extra steps: for reading the prompt, and for requests that left the queue earlier."""


async def asks_beside_many(world: World, request: Request) -> None:
    """Send many requests with one key, then one with another key, which must soon get its turn."""
    if not world.machine.config.http.api_key:
        return
    crowd_key, single_key = CLIENT_KEYS
    crowd = [
        asyncio.create_task(_first_token_at(world, _short(world.new_request()), crowd_key))
        for _ in range(randint(8, 12))
    ]
    await asyncio.sleep(uniform(0.1, 0.3))
    happened, others = world.troubles(), _streams_of(world, single_key)
    steps_left = _longest_answer(world) + MORE_STEPS
    accepted_at, first_at = await _first_token_at(world, _short(request), single_key)
    num_steps = _num_steps(world, accepted_at, first_at)
    is_calm = happened == world.troubles()
    firsts = [first for _, first in await asyncio.gather(*crowd)]
    if not is_calm or first_at is None:
        return
    num_before = sum(at is not None and accepted_at < at < first_at for at in firsts)
    assert num_before <= MAX_NUM_SEQS, (
        f"{request.key} waited {first_at - accepted_at:.1f} s, while {num_before} requests of "
        "another key began"
    )
    world.counts["turns beside many requests"] += 1
    if not others:
        # One of the running answers ends within this number of steps, which frees its place.
        assert num_steps <= steps_left, f"{request.key} waited {num_steps} of {steps_left} steps"
        world.counts["turns within a number of steps"] += 1


def _short(request: Request) -> Request:
    return request._replace(max_tokens=40, content="x")


def _streams_of(world: World, key: str) -> list[str]:
    """Return a key's streams that have not ended. The key's next request takes turns with them."""
    server = world.server
    if server is None or not world.is_up:
        return []
    owner = server.auth.owner(Headers({"authorization": f"Bearer {key}"}))
    streams = server.generation.streams
    return [it.record.id for it in streams if it.record.names.owner == owner]


def _longest_answer(world: World) -> int:
    """Return the most tokens that a live stream may still generate."""
    server = world.server
    streams = [] if server is None or not world.is_up else [*server.generation.streams]
    return max((it.record.request.sampling.max_tokens or 0 for it in streams), default=0)


def _num_steps(world: World, begin: float, end: float | None) -> int:
    """Return how many steps the server's engines have ended between the two times."""
    engines = world.server.engines() if world.server is not None else []
    ends = [at for engine in engines for at in engine.step_ends]
    return sum(begin < at < (end or begin) for at in ends)


async def _first_token_at(world: World, request: Request, key: str) -> tuple[float, float | None]:
    """Return when the request was accepted, and when its first token was written."""
    API_KEY.set(key)
    stream_id = await post_until_accepted(world, request)
    accepted_at = world_loop().time()
    events = await read_events(world, request, stream_id)
    check(world, request, events)
    first = next((event["at_ms"] for event in events if event["kind"] == "tokens"), None)
    return accepted_at, None if first is None else accepted_at + first / 1000
