"""All of a small cluster: two Ray nodes, Redis, two gateways on both, and HAProxy before these."""

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import Iterable
from pathlib import Path

from stress.cluster.balancer import Balancer, answers
from stress.cluster.nodes import RayNode, engines
from stress.site import FLAGS, START_S, Death, Site
from tools.harness.eventually import eventually
from tools.harness.processes import free_port, parent, ticks
from tools.harness.redis_servers import RedisServer

NUM_REPLICAS = 2  # of each gateway
_NOTICED_S = 3.0  # by HAProxy, that a gateway has gone
_REST_TICKS = 5  # of each engine within a second
_EMPTY_S = 60.0


class ClusterSite:
    """`worker` is the node that may die; the gateways are drivers on the head's."""

    def __init__(
        self, model: Path | str, folder: Path, address: str, head: RayNode, worker: RayNode
    ) -> None:
        self.redis = RedisServer(
            folder / "redis", "--appendonly", "yes", "--appendfsync", "always", port=free_port()
        )
        replicas = ("--cluster", address, "--replicas", str(NUM_REPLICAS))
        # in bfloat16, where no neighbour and no other replica changes a digit
        flags = (*FLAGS, "--dtype", "bfloat16", *replicas)
        self.gateways = [Site(model, self.redis.url, flags) for _ in range(2)]
        self.balancer = Balancer((self.gateways[0].port, self.gateways[1].port), folder)
        self.port = self.balancer.port
        self.head, self.worker = head, worker
        self.deaths: list[Death] = []
        self.problems: list[str] = []
        self._address = address
        self._away: list[tuple[float, float]] = []  # when connections to a gateway may break

    # as any target of a run

    def start(self) -> None:
        for it in self.gateways:
            it.start()

    async def ready(self) -> bool:
        if not all([await it.ready() for it in self.gateways]):
            return False
        await asyncio.to_thread(eventually, lambda: answers(f"{self.balancer.url}/health"))
        return await self.is_well(START_S)

    @property
    def complaints(self) -> list[str]:
        return self.problems + [line for it in self.gateways for line in it.complaints]

    @property
    def has_ended(self) -> bool:
        return any(it.has_ended for it in self.gateways)

    @property
    def last_lines(self) -> list[str]:
        return [line for it in self.gateways for line in it.last_lines]

    def was_out(self, began: float, ended: float) -> bool:
        """A gateway was just ended, or none was ready and known to be."""
        one, two = ([(a, b + _NOTICED_S) for a, b in it.outages] for it in self.gateways)
        nobody = [(max(a, c), min(b, d)) for a, b in one for c, d in two]
        return any(began < until and ended > since for since, until in self._away + nobody)

    async def is_well(self, within_s: float) -> bool:
        """Both gateways have an engine, and the balancer knows."""
        return all([await it.is_well(within_s) for it in self.gateways])

    async def is_whole(self, within_s: float) -> bool:
        """All engines that there should be are there, if maybe still loading."""
        deadline = time.monotonic() + within_s
        while len(self.engines()) < NUM_REPLICAS * len(self.gateways):
            if time.monotonic() > deadline:
                return False
            await asyncio.sleep(0.2)
        return await self.is_well(within_s)

    async def is_engine_at_rest(self) -> bool:
        before = {pid: ticks(pid) for pid in self.engines()}
        await asyncio.sleep(1.0)
        return all(ticks(pid) - was <= _REST_TICKS for pid, was in before.items())

    async def stop(self) -> int:
        codes = [await it.stop() for it in self.gateways]
        with contextlib.suppress(AssertionError):
            await asyncio.to_thread(eventually, lambda: not self.engines(), _EMPTY_S)
        if left := self.engines():
            self.problems.append(f"{len(left)} engines outlived their gateways")
        return next(filter(None, codes), 0)

    async def num_unfinished(self) -> int:
        with self.redis.client as client:
            number = await asyncio.to_thread(client.zcard, "headrace:live")
        return int(number)

    def close(self) -> None:
        for it in self.gateways:
            it.close()
        self.balancer.close()
        self.redis.close()
        self.worker.stop()

    # blows

    def engines(self) -> list[int]:
        """The processes of all engines on both nodes."""
        return engines(self.head, self.worker)

    def kill(self, what: str, pid: int) -> int:
        self.note(what)
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return 0
        return 1

    def note(self, what: str) -> None:
        self.deaths.append(Death(time.monotonic(), what))

    async def end_gateway(self, gateway: Site, number: int) -> None:
        """Ends it, waits until it has gone, and starts it again."""
        self.note("gateway" if number == signal.SIGKILL else "gateway by SIGTERM")
        began = time.monotonic()
        self._away.append((began, float("inf")))
        try:
            await gateway.kill_server(number)
        finally:
            self._away.remove((began, float("inf")))
            self._away.append((began - 0.1, time.monotonic() + _NOTICED_S))

    async def end_redis(self, seconds: float) -> None:
        """Connections that break meanwhile are not explained by it."""
        self.note("redis")
        self.redis.end(signal.SIGKILL)
        await asyncio.sleep(seconds)
        await asyncio.to_thread(self.redis.start)

    async def replace_worker(self) -> None:
        """Another node in the place of the one whose raylet has died."""
        await asyncio.to_thread(self.worker.stop)
        self.worker = await asyncio.to_thread(RayNode.join, self._address)


class ClusterBlows:
    """Draws a fault of all kinds, or of some; what takes long to start again comes less often."""

    WEIGHTS = {"engine": 4, "actor": 4, "node": 2, "gateway": 3, "redis": 4, "term": 1}

    def __init__(self, site: ClusterSite, kinds: Iterable[str] = WEIGHTS) -> None:
        self.kinds = tuple(it for it in kinds for _ in range(self.WEIGHTS[it]))
        self._site = site

    def second(self, fault: str) -> tuple[str, ...]:
        """Another one, of any kind, while the fleet recovers from the first."""
        return self.kinds

    async def do(self, fault: str, rng: random.Random) -> int:
        site = self._site
        if fault == "redis":
            await site.end_redis(rng.choice((0.0, 0.5, 3.0)))
            return 1
        if fault in ("gateway", "term"):
            return await self._end_gateway(fault, rng)
        if fault == "node":
            number = site.kill("node", raylet) if (raylet := site.worker.raylet) else 0
            await asyncio.sleep(rng.choice((0.0, 2.0)))
            await site.replace_worker()
            return number
        found = site.engines()
        if not found:
            return 0
        pid = rng.choice(found)
        return site.kill(fault, pid if fault == "engine" else parent(pid))

    async def _end_gateway(self, fault: str, rng: random.Random) -> int:
        gateway = rng.choice(self._site.gateways)
        number = signal.SIGKILL if fault == "gateway" else signal.SIGTERM
        await self._site.end_gateway(gateway, number)
        if rng.random() < 0.7 and not await gateway.ready():
            self._site.problems.append("a gateway did not start again")
        return int(fault == "gateway")
