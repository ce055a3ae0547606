"""Clients of all routes: they resume, retry, read slowly, stop streams and leave."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from detangle import choice, randint, uniform

from stress.simulated_server.clients.adapters import uses_an_adapter
from stress.simulated_server.clients.bytes import resumes_by_byte
from stress.simulated_server.clients.conversations import (
    cancels,
    deletes,
    leaves,
    lingers,
    replaces,
)
from stress.simulated_server.clients.damaged import sends_damaged_bodies
from stress.simulated_server.clients.dialects import asks_for_a_stream, repeats_the_request
from stress.simulated_server.clients.durable import resumes_durably
from stress.simulated_server.clients.embeddings import embeds
from stress.simulated_server.clients.events import reads_twice, resumes_by_event
from stress.simulated_server.clients.fairness import asks_beside_many
from stress.simulated_server.clients.keys import shares_a_key
from stress.simulated_server.clients.long_conversations import keeps_a_conversation
from stress.simulated_server.clients.responses import (
    answers_on_a_socket,
    keeps_a_response,
    refers_to_items,
)
from stress.simulated_server.clients.scores import embeds_elsewhere, ranks
from stress.simulated_server.clients.slow import reads_late
from stress.simulated_server.clients.sockets import uses_a_socket
from stress.simulated_server.http import API_KEY, CLIENT_KEYS
from stress.simulated_server.requests import Request
from stress.simulated_server.world import World

ClientKind = Callable[[World, Request], Awaitable[None]]
KINDS: tuple[ClientKind, ...] = (
    resumes_by_event,
    resumes_by_byte,
    resumes_durably,
    reads_twice,
    repeats_the_request,
    asks_for_a_stream,
    keeps_a_response,
    answers_on_a_socket,
    uses_a_socket,
    replaces,
    cancels,
    deletes,
    lingers,
    lingers,
    leaves,
    leaves,
    reads_late,
    asks_beside_many,
    embeds,
    embeds,
    shares_a_key,
    keeps_a_conversation,
    keeps_a_conversation,
    ranks,
    embeds_elsewhere,
    uses_an_adapter,
    refers_to_items,
    sends_damaged_bodies,
)


async def asks_for_a_while(world: World, kinds: Sequence[ClientKind] = KINDS) -> None:
    """Send a few requests with one API key, each as another kind of client."""
    API_KEY.set(choice(CLIENT_KEYS))
    for _ in range(randint(1, 3)):
        await asyncio.sleep(uniform(0.0, 8.0))
        kind = choice(kinds)
        world.counts[f"client {kind.__name__}"] += 1
        world.tell(f"client {kind.__name__}")
        await kind(world, world.new_request())
