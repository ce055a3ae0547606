"""Clients that read logs through every gateway, and record a history of what they received."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable

from stress.cluster.history import Observation, check, hash_of
from stress.compare import Violation
from stress.http import Call, Exchange, exchange
from stress.witness import Fates, Proxy
from tools.harness.sse import frames_of

OWN_KEY, FOREIGN_KEY = "sk-own-0123456789abcdef", "sk-foreign-0123456789abcdef"
_PAUSE_S = 0.4
_ANSWER_S = 20.0
# One of _FOLLOWS reads follows the log to its end. Of the others, one of _FOREIGN reads comes from
# a client with another key.
_FOREIGN, _FOLLOWS = 10, 4
# Only this many of the newest streams are read.
_NEWEST = 12
_NUM_TRIES = 40
# The longest time from the start of a failover until gateways use the new primary.
_FAILOVER_S = 15.0


class Observers:
    """Readers of recent streams. `roads` has the addresses of the gateways and the balancer.

    `live` returns the ids of the streams that have not ended. `was_failover` returns whether Redis
    failed over between two times: a failover may lose a stream that the replica did not have yet.
    """

    def __init__(
        self,
        roads: dict[str, tuple[str, int]],
        live: Callable[[], Awaitable[list[str]]],
        was_failover: Callable[[float, float], bool],
        seed: int,
    ) -> None:
        self.observations: list[Observation] = []
        # The number of streams that a failover lost.
        self.num_vanished = 0
        self._was_failover = was_failover
        self._random = random.Random(f"{seed}/observers")
        self._roads = {
            name: Proxy(port, Fates("", 0.0), host=host) for name, (host, port) in roads.items()
        }
        self._live = live
        # The ids of all streams, oldest first.
        self._stream_ids: dict[str, None] = {}

    async def run(self, num: int = 3) -> None:
        """Read streams until cancelled."""
        for road in self._roads.values():
            await road.open()
        await asyncio.gather(self._look(), *(self._observe() for _ in range(num)))

    async def violations(self) -> list[Violation]:
        """Read the final logs through the balancer, and compare the history with them."""
        finals = {}
        unread = []
        for stream_id in {seen.stream_id for seen in self.observations}:
            events = await self._final(stream_id)
            if events is None and self._lost_by_failover(stream_id):
                self.num_vanished += 1
            elif events is None:
                what = f"{stream_id}: its final log cannot be read"
                unread.append(Violation("lost", 1, what))
            else:
                finals[stream_id] = events
        return [*unread, *check(self.observations, finals)]

    def _lost_by_failover(self, stream_id: str) -> bool:
        seen = [it for it in self.observations if it.stream_id == stream_id and not it.is_foreign]
        last = max((it.ended for it in seen if it.hashes), default=0.0)
        missed = min((it.began for it in seen if it.began > last), default=float("inf"))
        return self._was_failover(last - _FAILOVER_S, missed)

    async def _look(self) -> None:
        while True:
            for stream_id in await self._live():
                self._stream_ids.setdefault(stream_id)
            await asyncio.sleep(_PAUSE_S)

    async def _observe(self) -> None:
        while True:
            await asyncio.sleep(self._random.uniform(0, 2 * _PAUSE_S))
            if self._stream_ids:
                stream_id = self._random.choice([*self._stream_ids][-_NEWEST:])
                name = self._random.choice(sorted(self._roads))
                if self._random.randrange(_FOLLOWS) == 0:
                    await self._follow(stream_id, name)
                else:
                    await self._snapshot(stream_id, name, self._random.randrange(_FOREIGN) == 0)

    async def _follow(self, stream_id: str, name: str) -> None:
        made = await self._get(f"{stream_id}/events", name, OWN_KEY)
        frames = [it for it in frames_of(bytes(made.got.body)) if it.id is not None]
        if made.got.status == 200 and frames:
            hashes = tuple(hash_of(frame.json) for frame in frames)
            times = made.began, made.ended
            self.observations.append(Observation(stream_id, *times, 0, hashes, via=name))

    async def _snapshot(self, stream_id: str, name: str, is_foreign: bool) -> None:
        began = time.monotonic()
        hashes = await self._events(stream_id, name, FOREIGN_KEY if is_foreign else OWN_KEY)
        if hashes is None or (is_foreign and not hashes):
            return
        times = began, time.monotonic()
        seen = Observation(stream_id, *times, 0, tuple(hashes), True, name, is_foreign)
        self.observations.append(seen)

    async def _events(self, stream_id: str, name: str, key: str) -> list[bytes] | None:
        """Return hashes of a stream's events, [] if it is not found, None if the read failed."""
        hashes: list[bytes] = []
        while True:
            after = f"&after={len(hashes) - 1}" if hashes else ""
            path = f"{stream_id}/events?limit=1000{after}"
            made = await self._get(path, name, key, ("Accept", "application/json"))
            if made.got.is_whole and made.got.status == 404:
                return []
            if not made.got.is_whole or made.got.status != 200:
                return None
            page = made.got.json
            hashes += map(hash_of, page["events"])
            if page["done"] or not page["events"]:
                return hashes

    async def _final(self, stream_id: str) -> list[bytes] | None:
        for _ in range(_NUM_TRIES):
            if hashes := await self._events(stream_id, "balancer", OWN_KEY):
                return hashes
            await asyncio.sleep(_PAUSE_S)
        return None

    async def _get(self, path: str, name: str, key: str, *more: tuple[str, str]) -> Exchange:
        headers = (("Authorization", f"Bearer {key}"), *more)
        call = Call("GET", f"/v1/streams/{path}", b"", headers, silence_s=_ANSWER_S)
        return await exchange(self._roads[name], call)
