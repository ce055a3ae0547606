"""A run with several gateways, each on its own machine with its own engine, and one Redis.

Clients reach a random gateway, and another one after each break. Gateways are killed, stopped,
paused and cut off from Redis; Redis stalls, restarts and loses connections. In some runs, a replica
that lacks the newest writes replaces Redis.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextvars import copy_context
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from detangle import choice, randint, uniform

from headrace.fleet.served_model import ServedModel
from headrace.streams.stores.redis_lease import LEASE_S, NUM_CHECKS, RENEW_S
from headrace.streams.stores.state_dir import StateError
from headrace_common.config.settings import HttpConfig, ServerConfig
from stress.simulated_server import redis_model
from stress.simulated_server.http import ADMIN_KEY, CLIENT_KEYS, Broken, Connection, connect
from stress.simulated_server.redis_model import RedisModel
from stress.simulated_server.server import Machine, SimServer
from stress.simulated_server.system import world_loop
from stress.simulated_server.world import (
    PATIENCE_S,
    SILENCE_S,
    Client,
    World,
    check_nothing_is_kept,
)

T = TypeVar("T")

TAKEOVER_S = LEASE_S + (NUM_CHECKS + 1) * RENEW_S + 2.0
"""Within this time after a death, a stream has another gateway; 2 s allow for slow answers."""
RATES = {
    "redis: connection lost before a command": 0.005,
    "redis: connection lost before an answer": 0.005,
    "redis: stalls": 0.003,
    "redis: restarts after a file's write": 0.1,
}
FAILOVERS = {"redis: failover after a command": 0.003}
BATCH_RATES = {
    "gateway: killed at a batch's write": 0.1,
    "gateway: paused at a batch's command": 0.03,
}
"""The highest rates of faults that strike a gateway between two commands for a batch."""
MAX_PAUSE_S = 60.0
"""Within this time, another gateway can end a batch, and the claim on the batch can expire."""


def draw_failovers() -> bool:
    """Choose whether a replica may replace Redis in a run."""
    return choice((False, False, True))


class Gateway:
    """A machine of the cluster. An operator that works on it sets `is_busy`."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.name = machine.name
        self.is_busy = False
        self.is_cut_off = False
        # The time until which connections may be silent, because the process was paused.
        self.paused_until = 0.0

    @property
    def server(self) -> SimServer:
        assert self.machine.server is not None
        return self.machine.server

    @property
    def is_up(self) -> bool:
        server = self.machine.server
        return server is not None and server.app is not None and not server.has_ended.is_set()


class ClusterWorld(World):
    """Several gateways and a Redis."""

    def __init__(self, folder: Path, model: ServedModel) -> None:
        super().__init__(folder, model)
        # Such an engine is killed after up to ten minutes, which other runs cover.
        for kind in ("engine: hangs in a step", "engine: hangs between two steps"):
            self.faults.rates.pop(kind, None)
        # Streams must last for long enough to be taken over.
        self.faults.rates["engine: slow step"] = choice((0.0, 0.1, 0.3))
        self.has_failovers = draw_failovers()
        failovers = FAILOVERS if self.has_failovers else {}
        for kind, most in {**RATES, **BATCH_RATES, **failovers}.items():
            self.faults.rates[kind] = choice((0.0, 0.0, 0.3, 1.0)) * most
        self.redis = RedisModel(self.faults, self.counts)
        self.redis.on_batch_command = self._batch_command
        self.redis.on_recovered = self.disturbed
        self.redis.on_failover = self._failed_over
        # The streams that a failover must not end, unless a gateway has failed since.
        self._mended: set[str] = set()
        self._num_gateway_faults = 0
        # Faults that an operator did not cause, and the context in which they run.
        self._breaking: list[asyncio.Task[None]] = []
        self._context = copy_context()
        self.gateways = [
            Gateway(self._machine(folder, f"gateway{number}")) for number in range(randint(2, 3))
        ]
        # All events that any client has read, by stream and number.
        self.seen: dict[tuple[str, int], object] = {}
        self._by_id: dict[str, SimServer] = {}
        self._orphans: dict[str, float] = {}
        self._calm_since = 0.0
        self._num_faults = 0

    def _machine(self, folder: Path, name: str) -> Machine:
        config, redis = self.machine.config, redis_model.URL
        return Machine(folder / name, config, self.model, self.faults, name, redis)

    def _config(self) -> ServerConfig:
        http = HttpConfig(api_key=CLIENT_KEYS, admin_key=ADMIN_KEY)
        return msgspec.structs.replace(super()._config(), http=http)

    @property
    def server(self) -> SimServer | None:
        """A random running gateway, as a load balancer chooses one."""
        up = [it.server for it in self.gateways if it.is_up]
        return choice(up) if up else None

    async def until_up(self) -> None:
        # Each gateway has a machine of its own, and `machine` never starts.
        while not self.is_up:
            await asyncio.sleep(0.1)

    def has_lost(self, *texts: str) -> bool:
        return any(id in text for id in self.redis.lost for text in texts)

    def must_go_on(self, stream_id: str) -> bool:
        """Return whether the writer of a stream can store all events again that Redis has lost."""
        return stream_id in self._mended and self._num_gateway_faults == self._gateway_faults()

    def _failed_over(self, mended: set[str]) -> None:
        is_only_fault = self.faults.injected["redis: failover"] == 1
        is_only_fault &= not any(it.is_busy for it in self.gateways)
        self._mended = mended if is_only_fault else set()
        self._num_gateway_faults = self._gateway_faults()

    def _gateway_faults(self) -> int:
        happened = self.faults.injected.items()
        return sum(number for kind, number in happened if kind.startswith("gateway: "))

    def busy_gateway(self) -> Gateway:
        """Return a gateway that writes a stream, if there is one, and any gateway otherwise."""
        ids = [self.redis.field(id, "gateway") for id in self.redis.live()]
        names = {it.process.name.split()[0] for id in ids if (it := self._by_id.get(id))}
        busy = [it for it in self.gateways if it.name in names]
        return choice(busy or self.gateways)

    def disturbed(self) -> None:
        """Note that a fault begins or ends, so that a takeover may take longer."""
        self._calm_since = world_loop().time()

    def _batch_command(self, host: str, is_write: bool) -> None:
        """Strike a gateway whose command for a batch Redis has just executed, now and then.

        The gateway has not received the answer yet.
        """
        gateway = next(it for it in self.gateways if it.name == host)
        if gateway.is_busy or not gateway.is_up:
            return
        if is_write and self.faults.hits("gateway: killed at a batch's write"):
            work = _kill
        elif self.faults.hits("gateway: paused at a batch's command"):
            work = _pause
        else:
            return
        gateway.is_busy = True
        task = asyncio.create_task(self._strike(work, gateway), context=self._context)
        self._breaking.append(task)

    async def _strike(self, work: "Strike", gateway: Gateway) -> None:
        await work(self, gateway)
        gateway.is_busy = False

    async def in_time(
        self, connection: Connection, work: Awaitable[T], seconds: float = SILENCE_S
    ) -> T:
        server = connection._server
        gateway = next(it for it in self.gateways if it.name == server.process.name.split()[0])
        try:
            async with asyncio.timeout(seconds):
                return await work
        except TimeoutError:
            was_paused = gateway.paused_until > world_loop().time() - seconds
            if server.has_ended.is_set() or was_paused:
                connection.close()
                raise Broken from None
            name = connection.task.get_name()
            raise AssertionError(f"{name}: no byte for {seconds:g} s") from None

    async def run(self, clients: Sequence[Client], operators: Sequence[Client]) -> None:
        await self.redis.start()
        for gateway in self.gateways:
            gateway.machine.start()
        watching = asyncio.create_task(self._watch(), name="watch")
        operating = [asyncio.create_task(it(self), name="operator") for it in operators]
        asking = asyncio.gather(*(asyncio.create_task(it(self), name="client") for it in clients))
        try:
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.wait((asking, watching), return_when=asyncio.FIRST_COMPLETED)
                if watching.done():
                    watching.result()
                await asking
        except TimeoutError:
            raise AssertionError(f"clients are not done after {PATIENCE_S:g} s") from None
        self.faults.stop()
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*operating, *self._breaking)
        await self._finish()
        watching.cancel()
        await asyncio.wait((watching,))

    async def _watch(self) -> None:
        """Check the logs and the takeovers; restart gateways that could not start."""
        while True:
            await asyncio.sleep(0.5)
            for gateway in self.gateways:
                self._look_after(gateway)
            kinds = (*RATES, "redis: failover")
            num_faults = sum(self.faults.injected[kind] for kind in kinds)
            if num_faults > self._num_faults:
                self._num_faults = num_faults
                self.disturbed()
            self.counts["logs compared"] += self.redis.check_logs()
            self._check_takeovers()
            assert not self.tracebacks, f"a lost stream has a traceback: {self.tracebacks[0]}"

    def _look_after(self, gateway: Gateway) -> None:
        server = gateway.machine.server
        if server is None:
            return
        if hasattr(server, "store"):
            self._by_id[server.store.gateway] = server  # type: ignore[attr-defined]
        if server.has_ended.is_set() and not gateway.is_busy:
            error = server.error
            assert isinstance(error, StateError), f"{gateway.name} has ended by itself: {error!r}"
            server.task.exception()
            self.faults.note("gateway: start without Redis")
            self.disturbed()
            gateway.machine.start()

    def _check_takeovers(self) -> None:
        now = world_loop().time()
        can_take_over = (
            it.is_up and not it.is_cut_off and not it.server.process.is_paused
            for it in self.gateways
        )
        if not any(can_take_over):
            self.disturbed()
        orphans = {}
        for id in self.redis.live():
            owner = self._by_id.get(self.redis.field(id, "gateway"))
            if owner is None or owner.has_ended.is_set():
                orphans[id] = self._orphans.get(id, now)
        self._orphans = orphans
        for id, since in orphans.items():
            waited = now - max(since, self._calm_since)
            assert waited < TAKEOVER_S, f"{id} has had no gateway for {waited:.1f} s"

    async def _finish(self) -> None:
        """Let healthy gateways finish everything, stop them, and look for what is left over."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while self.redis.live() or self.redis.keys("batches:open"):
                    await asyncio.sleep(1)
        except TimeoutError:
            left = self.redis.live(), self.redis.keys("batches:open")
            raise AssertionError(f"streams or batches never end: {left}") from None
        # Connections, cancels and leases of dead gateways may still end.
        await asyncio.sleep(20.0)
        for gateway in self.gateways:
            check_nothing_is_kept(gateway.server)
            gateway.is_busy = True
        for gateway in self.gateways:
            await self.stop(gateway.server)
        await asyncio.sleep(1.0)
        for gateway in self.gateways:
            left = [it.get_name() for it in world_loop().living_tasks(gateway.server.process)]
            assert not left, f"tasks outlive {gateway.name}: {left}"
        kept = [key for start in ("g:", "o:", "gateways", "live") for key in self.redis.keys(start)]
        assert not kept, f"stopped gateways leave {kept}"


async def breaks_gateways(world: World) -> None:
    """Kill, stop, pause and cut off gateways at random times."""
    assert isinstance(world, ClusterWorld)
    for _ in range(randint(0, 4)):
        await asyncio.sleep(uniform(0.0, 20.0))
        for _ in range(20):
            if world.redis.live():
                break
            await asyncio.sleep(0.5)
        gateway = world.busy_gateway()
        if gateway.is_busy or gateway.server.has_ended.is_set():
            continue
        gateway.is_busy = True
        await choice((_kill, _stop, _pause, _cut_off, _drain))(world, gateway)
        gateway.is_busy = False


async def _kill(world: ClusterWorld, gateway: Gateway) -> None:
    world.faults.note("gateway: killed")
    world.tell(f"{gateway.name} is killed")
    gateway.machine.kill()
    await asyncio.sleep(uniform(0.0, 25.0))
    gateway.machine.start()


async def _stop(world: ClusterWorld, gateway: Gateway) -> None:
    world.faults.note("gateway: stopped")
    server = gateway.server
    server.stop()
    done, _ = await asyncio.wait((server.task,), timeout=120.0)
    assert done, f"{gateway.name} does not stop"
    if not isinstance(server.task.exception(), StateError):
        server.task.result()
    await asyncio.sleep(uniform(0.0, 15.0))
    gateway.machine.start()


async def _pause(world: ClusterWorld, gateway: Gateway) -> None:
    """Pause a gateway's process, often for longer than its lease."""
    seconds = choice((uniform(0.5, 6.0), uniform(6.0, 30.0), uniform(30.0, MAX_PAUSE_S)))
    world.faults.note("gateway: paused")
    world.tell(f"{gateway.name} is paused for {seconds:.1f} s")
    gateway.paused_until = world_loop().time() + seconds
    process = gateway.server.process
    process.pause()
    await asyncio.sleep(seconds)
    process.unpause()
    world.disturbed()


async def _cut_off(world: ClusterWorld, gateway: Gateway) -> None:
    """Cut the network between a gateway and Redis. What was sent arrives later."""
    world.faults.note("gateway: cut off from Redis")
    world.tell(f"{gateway.name} is cut off from Redis")
    net = world_loop().net
    net.disconnect(gateway.name, redis_model.HOST)
    gateway.is_cut_off = True
    await asyncio.sleep(uniform(0.5, 30.0))
    net.reconnect(gateway.name, redis_model.HOST)
    gateway.is_cut_off = False
    world.tell(f"{gateway.name} reaches Redis again")
    world.disturbed()


async def _drain(world: ClusterWorld, gateway: Gateway) -> None:
    """Let a gateway refuse new requests for a while."""
    for method in ("POST", "DELETE"):
        with contextlib.suppress(Broken):
            headers = {"authorization": f"Bearer {ADMIN_KEY}"}
            connection = connect(gateway.server, method, "/manage/drain", headers)
            await world.in_time(connection, connection.read())
            assert connection.status == 200, f"{method} /manage/drain: {connection.status}"
            world.faults.note(f"gateway: {method} drain")
        await asyncio.sleep(uniform(0.0, 10.0))


Strike = Callable[[ClusterWorld, Gateway], Coroutine[Any, Any, None]]


async def breaks_redis(world: World) -> None:
    """Restart and stall Redis at random times; publish messages that no gateway can read."""
    assert isinstance(world, ClusterWorld)
    for message in choice(((), (b"\xff", b""))):
        await asyncio.sleep(uniform(0.0, 10.0))
        world.faults.note("redis: damaged message")
        world.redis.publish("ask", message)
    for _ in range(choice((1, 2) if world.has_failovers else (0, 0, 1, 2))):
        await asyncio.sleep(uniform(0.0, 30.0))
        world.disturbed()
        if world.has_failovers and choice((True, True, False)):
            lag_s = choice((uniform(0.0, 2.0), uniform(2.0, 20.0)))
            world.redis.fail_over(lag_s)
            # The failover must not happen after the gateways have stopped.
            await asyncio.sleep(lag_s + 6.0)
        elif choice((True, False)):
            seconds = uniform(0.5, 15.0)
            world.faults.note("redis: stalls for long")
            world.redis.stall(seconds)
            await _disturb(world, seconds)
        else:
            world.faults.note("redis: restarted")
            world.redis.stop()
            await _disturb(world, uniform(0.1, 20.0))
            await world.redis.start()
            world.tell("Redis is back")
        world.disturbed()


async def _disturb(world: ClusterWorld, seconds: float) -> None:
    """Wait while Redis does not answer; no stream can be taken over meanwhile."""
    ends = world_loop().time() + seconds
    while (left_s := ends - world_loop().time()) > 0:
        await asyncio.sleep(min(left_s, RENEW_S))
        world.disturbed()
