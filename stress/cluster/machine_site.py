"""A cluster of machines as the target of a run, and the faults of its machines and links."""

import asyncio
import contextlib
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable

import redis

from stress.cluster.balancer import answers
from stress.cluster.batches import BatchClient
from stress.cluster.machines import GatewayNode, Machines
from stress.cluster.network import Machine
from stress.cluster.observers import Observers
from stress.cluster.relay import Weather
from stress.site import START_S, Death
from tools.harness.eventually import eventually

# After a fault has ended, connections may still break for this long, because HAProxy and the
# gateways only gradually notice which connections over the broken link have ended.
_AFTERMATH_S = 12.0
_DAY_S = 86_400


class MachineSite:
    """The cluster under test. Faults are the only excuse for a broken connection."""

    def __init__(self, cluster: Machines, seed: int) -> None:
        self.cluster = cluster
        self.host, self.port = cluster.host, cluster.port
        self.deaths: list[Death] = []
        self.problems: list[str] = []
        self.num_faults = Counter[str]()
        self._faulty: list[tuple[float, float]] = [(time.monotonic(), float("inf"))]
        roads = {it.machine.name: (it.site.host, it.site.port) for it in cluster.gateways}
        roads["balancer"] = (cluster.host, cluster.port)
        self._observers = Observers(roads, self._live, self._was_failover, seed)
        self._observing: asyncio.Task[None]
        self._batches = BatchClient(cluster.url, seed, self._was_failover)

    # The methods that every target of a run has.

    def start(self) -> None:
        self.cluster.start_services()
        for it in self.cluster.gateways:
            it.site.start()
        self._observing = asyncio.create_task(self._observers.run(), name="observers")

    async def ready(self) -> bool:
        if not all([await it.site.ready() for it in self.cluster.gateways]):
            return False
        url = f"{self.cluster.url}/health"
        await asyncio.to_thread(eventually, lambda: answers(url), START_S)
        await self._batches.start()
        self._faulty = []
        return True

    @property
    def complaints(self) -> list[str]:
        lines = [line for it in self.cluster.gateways for line in it.site.complaints]
        return self.problems + lines

    @property
    def has_ended(self) -> bool:
        return any(it.site.has_ended for it in self.cluster.gateways)

    @property
    def last_lines(self) -> list[str]:
        return [line for it in self.cluster.gateways for line in it.site.last_lines]

    def was_out(self, began: float, ended: float) -> bool:
        return any(began < until and ended > since for since, until in self._faulty)

    async def is_well(self, within_s: float) -> bool:
        return all([await it.site.is_well(within_s) for it in self.cluster.gateways])

    async def is_engine_at_rest(self) -> bool:
        await self._batches.finish()
        return all([await it.site.is_engine_at_rest() for it in self.cluster.gateways])

    async def stop(self) -> int:
        self._observing.cancel()
        found = await self._observers.violations()
        self.problems += [f"{it.kind} in the history: {it.what}" for it in found]
        self.problems += [f"{it.kind} in a batch: {it.what}" for it in self._batches.violations]
        codes = [await it.site.stop() for it in self.cluster.gateways]
        return next(filter(None, codes), 0)

    async def num_unfinished(self) -> int:
        return len(await self._live())

    def close(self) -> None:
        """Do nothing: the network's end kills everything."""

    def summary(self) -> str:
        """Return how often each fault happened, and how much was read from logs and batches."""
        faults = ", ".join(f"{num} {kind}" for kind, num in sorted(self.num_faults.items()))
        observers, batches = self._observers, self._batches
        return (
            f"faults: {faults}; reads in the history: {len(observers.observations)}; "
            f"lines of batches: {batches.num_lines}; lost by failovers: "
            f"{observers.num_vanished} streams, {batches.num_vanished} batches"
        )

    def _was_failover(self, since: float, until: float = float("inf")) -> bool:
        return any(it.what == "failover" and since < it.at < until for it in self.deaths)

    async def _live(self) -> list[str]:
        return await asyncio.to_thread(self._live_now)

    def _live_now(self) -> list[str]:
        with contextlib.suppress(redis.RedisError, OSError), self.cluster.primary.client as client:
            found = client.zrange("headrace:live", 0, -1)
            assert isinstance(found, list)
            # The server deletes the stream of a batch's line when it has stored the answer.
            keys = [client.hget(f"headrace:s:{id.decode()}", "key") or b"" for id in found]
            pairs = zip(found, keys, strict=True)
            return [id.decode() for id, key in pairs if b"batch_" not in key]
        return []

    # For the faults.

    @contextlib.asynccontextmanager
    async def fault(self, kind: str) -> AsyncIterator[None]:
        """Excuse broken connections during the block and some seconds after the block."""
        self.num_faults[kind] += 1
        self.deaths.append(Death(time.monotonic(), kind))
        entry = (time.monotonic(), float("inf"))
        self._faulty.append(entry)
        try:
            yield
        finally:
            await self.cluster.calm()
            self._faulty.remove(entry)
            self._faulty.append((entry[0] - 0.1, time.monotonic() + _AFTERMATH_S))


class MachineFaults:
    """Causes faults. `do` returns when the fault has ended, even if clients have not recovered."""

    WEIGHTS = {
        "gateway-redis": 4,
        "gateway-clients": 3,
        "unplugged": 2,
        "lost-requests": 2,
        "lost-answers": 2,
        "slow": 3,
        "paused": 3,
        "killed": 3,
        "stopped": 1,
        "clock": 2,
        "redis-killed": 2,
        "redis-paused": 1,
        "failover": 3,
        "switchover": 2,
    }

    def __init__(self, site: MachineSite, kinds: Iterable[str] = WEIGHTS) -> None:
        self.kinds = tuple(it for it in kinds for _ in range(self.WEIGHTS[it]))
        self._site = site
        self._cluster = site.cluster
        self._network = site.cluster.network

    def second(self, fault: str) -> tuple[str, ...]:
        """Return an empty tuple, because no second fault begins before a fault has ended."""
        return ()

    async def do(self, fault: str, rng: random.Random) -> int:
        gateway = rng.choice(self._cluster.gateways)
        async with self._site.fault(fault):
            if fault in ("killed", "stopped"):
                await self._restart(gateway, fault)
            elif fault in ("failover", "switchover", "redis-killed", "redis-paused"):
                await self._break_redis(fault, rng)
            else:
                await self._break_gateway(fault, gateway, rng)
        # The run ends after a number of kills. Every fault counts as a kill, as few faults kill.
        return 1

    async def _break_gateway(self, fault: str, gateway: GatewayNode, rng: random.Random) -> None:
        machine, network = gateway.machine, self._network
        seconds = rng.choice((3.0, 10.0, 20.0))
        if fault == "gateway-redis":
            for other in self._redis_machines():
                network.part(machine, other)
            network.drop(machine, self._cluster.redis_address)
        elif fault == "gateway-clients":
            network.part(machine, self._cluster.balancer_machine)
        elif fault == "unplugged":
            network.cut(machine)
        elif fault == "lost-requests":
            await gateway.set_weather(Weather(up=False, loses=rng.random() < 0.5))
        elif fault == "lost-answers":
            await gateway.set_weather(Weather(down=False, loses=rng.random() < 0.5))
        elif fault == "slow":
            delay_s = rng.choice((0.01, 0.1, 0.5))
            await gateway.set_weather(Weather(delay_s, delay_s, 0.05, rng.choice((0.2, 3.0))))
        elif fault == "clock":
            gateway.set_clock(rng.choice((-10 * _DAY_S, -60, 60, 3600, 10 * _DAY_S)))
        else:
            assert fault == "paused"
            seconds = rng.choice((3.0, 11.0))
            machine.pause()
        await asyncio.sleep(seconds)
        if fault == "paused":
            machine.resume()

    def _redis_machines(self) -> tuple[Machine, Machine]:
        return self._cluster.primary.machine, self._cluster.replica.machine

    async def _restart(self, gateway: GatewayNode, fault: str) -> None:
        """Kill all processes of a gateway's machine or stop its server, and start it again."""
        if fault == "killed":
            await asyncio.to_thread(gateway.machine.kill)
        number = signal.SIGKILL if fault == "killed" else signal.SIGTERM
        await gateway.site.bring_down(number)
        await asyncio.to_thread(gateway.start_relay)
        gateway.site.start()
        if not await gateway.site.ready():
            self._site.problems.append(f"{gateway.machine.name} did not start again")

    async def _break_redis(self, fault: str, rng: random.Random) -> None:
        """Break Redis for less than 8 s, because after 8 s new streams end with an error."""
        cluster = self._cluster
        old, new = cluster.primary, cluster.replica
        if fault == "redis-paused":
            old.machine.pause()
            await asyncio.sleep(3.0)
            old.machine.resume()
        elif fault == "redis-killed":
            old.kill()
            await asyncio.sleep(rng.choice((0.0, 3.0)))
            await asyncio.to_thread(old.start)
        elif fault == "failover":
            if rng.random() < 0.5:
                old.kill()
            else:
                self._network.cut(old.machine)
            await asyncio.sleep(rng.choice((0.0, 3.0)))
            await asyncio.to_thread(cluster.fail_over)
            await asyncio.sleep(1.0)
            # The old primary returns as a replica. Its last writes may never have been copied.
            old.kill()
            self._network.heal()
            await asyncio.to_thread(old.start, new)
        else:
            await asyncio.to_thread(cluster.switch_over)
        await asyncio.to_thread(eventually, cluster.replica.is_in_sync)
