"""A small cluster: two Ray nodes, Redis, two gateways that use both nodes, and HAProxy in front."""

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

# How many replicas each gateway has.
NUM_REPLICAS = 2
# Within this time HAProxy notices that a gateway has died.
_NOTICED_S = 3.0
# An engine is at rest if it uses at most this many processor ticks per second.
_REST_TICKS = 5
_EMPTY_S = 60.0


class ClusterSite:
    """A cluster under test. Only the node `worker` may die; the gateways run on the head node."""

    def __init__(
        self, model: Path | str, folder: Path, address: str, head: RayNode, worker: RayNode
    ) -> None:
        self.redis = RedisServer(
            folder / "redis", "--appendonly", "yes", "--appendfsync", "always", port=free_port()
        )
        replicas = ("--cluster", address, "--replicas", str(NUM_REPLICAS))
        # In bfloat16, results depend neither on the rest of the batch nor on the replica.
        flags = (*FLAGS, "--dtype", "bfloat16", *replicas)
        self.gateways = [Site(model, self.redis.url, flags) for _ in range(2)]
        self.balancer = Balancer.local((self.gateways[0].port, self.gateways[1].port), folder)
        self.host, self.port = "127.0.0.1", self.balancer.port
        self.head, self.worker = head, worker
        self.deaths: list[Death] = []
        self.problems: list[str] = []
        self._address = address
        # Periods during which connections to a gateway may break.
        self._away: list[tuple[float, float]] = []

    # The methods that every target of a run has.

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
        """Return whether a gateway was being stopped, or both gateways were unavailable."""
        one, two = ([(a, b + _NOTICED_S) for a, b in it.outages] for it in self.gateways)
        nobody = [(max(a, c), min(b, d)) for a, b in one for c, d in two]
        return any(began < until and ended > since for since, until in self._away + nobody)

    async def is_well(self, within_s: float) -> bool:
        """Waits until both gateways have an engine; returns False after `within_s` seconds."""
        return all([await it.is_well(within_s) for it in self.gateways])

    async def is_whole(self, within_s: float) -> bool:
        """Waits until all engines exist, even if some are still loading."""
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

    # The faults.

    def engines(self) -> list[int]:
        """Return the processes of all engines on both nodes."""
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
        """Ends a gateway, waits for its exit, and starts it again."""
        self.note("gateway" if number == signal.SIGKILL else "gateway by SIGTERM")
        began = time.monotonic()
        self._away.append((began, float("inf")))
        try:
            await gateway.kill_server(number)
        finally:
            self._away.remove((began, float("inf")))
            self._away.append((began - 0.1, time.monotonic() + _NOTICED_S))

    async def end_redis(self, seconds: float) -> None:
        """Kills Redis and starts it again. The restart may not break clients' connections."""
        self.note("redis")
        self.redis.end(signal.SIGKILL)
        await asyncio.sleep(seconds)
        await asyncio.to_thread(self.redis.start)

    async def replace_worker(self) -> None:
        """Replaces the node whose raylet has died."""
        await asyncio.to_thread(self.worker.stop)
        self.worker = await asyncio.to_thread(RayNode.join, self._address)


class ClusterBlows:
    """The faults of a cluster. Faults with a slow restart are drawn less often."""

    WEIGHTS = {"engine": 4, "actor": 4, "node": 2, "gateway": 3, "redis": 4, "term": 1}

    def __init__(self, site: ClusterSite, kinds: Iterable[str] = WEIGHTS) -> None:
        self.kinds = tuple(it for it in kinds for _ in range(self.WEIGHTS[it]))
        self._site = site

    def second(self, fault: str) -> tuple[str, ...]:
        """Return every fault: a second fault may happen while the fleet recovers."""
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
