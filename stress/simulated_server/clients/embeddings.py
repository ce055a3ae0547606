"""Clients of /v1/embeddings, whose engine often dies while the vectors are computed."""

import json
import signal

from detangle import flip, randint

from stress.simulated_server.clients.common import Backoff, refused
from stress.simulated_server.http import Broken, connect
from stress.simulated_server.requests import MODEL, Request
from stress.simulated_server.system import world_loop
from stress.simulated_server.world import World


async def embeds(world: World, request: Request) -> None:
    """Embed more texts than the engine takes at once; equal texts have equal vectors."""
    texts = [f"{request.seed} {n % 9}" * (1 + n % 3) for n in range(randint(1, 150))]
    backoff = Backoff()
    while True:
        try:
            body = {"model": MODEL, "input": texts}
            connection = connect(world.server, "POST", "/v1/embeddings", {}, body)
            if flip(0.7):
                world_loop().after_steps(randint(1, 500), lambda: _kill_engine(world))
            if await connection.begin() == 200:
                _check(texts, json.loads(await connection.read())["data"])
                world.counts["embeddings"] += len(texts)
                return
            await refused(world, connection)
        except Broken:
            pass
        await backoff.pause()


def _kill_engine(world: World) -> None:
    if world.is_up and not world.is_calm and (server := world.server) is not None:
        for engine in server.engines()[:1]:
            world.faults.note("engine: killed from outside")
            engine.die(-signal.SIGKILL)


def _check(texts: list[str], data: list[dict[str, object]]) -> None:
    """Check that each text has a vector, and that two vectors are equal if their texts are."""
    assert [it["index"] for it in data] == [*range(len(texts))], f"{len(data)} of {len(texts)}"
    found: dict[str, str] = {}
    for text, it in zip(texts, data, strict=True):
        vector = str(it["embedding"])
        assert found.setdefault(text, vector) == vector, f"two vectors of {text!r}"
    assert len({*found.values()}) == len(found), "two texts have one vector"
