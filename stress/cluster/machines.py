"""A cluster of machines: gateways behind HAProxy, Redis with a replica, and clients.

Each part has a machine of its own. Each gateway reaches Redis through a relay on the gateway's
machine. In a failover, the address of Redis moves to the replica.
"""

import contextlib
import json
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import httpx
import redis

from stress.cluster.balancer import Balancer
from stress.cluster.network import Machine, Network
from stress.cluster.relay import CALM, Weather, command
from stress.site import FLAGS, Site
from tools.harness.eventually import eventually

_REDIS_PORT = _RELAY_PORT = 6379
_BALANCER_PORT = 8080
_SETTINGS = (
    *("--appendonly", "yes", "--appendfsync", "always", "--save", ""),
    *("--protected-mode", "no", "--repl-diskless-sync-delay", "0", "--repl-timeout", "10"),
)
_CLOCK = Path(__file__).with_name("clock.c")


class RedisNode:
    """A Redis server on its own machine, with a folder that survives the process."""

    def __init__(self, machine: Machine, folder: Path, flags: Iterable[str] = ()) -> None:
        self.machine = machine
        self._folder = folder / machine.name
        self._folder.mkdir(parents=True)
        self._flags = tuple(flags)
        # The path of a Unix socket must be short.
        self._sockets = tempfile.TemporaryDirectory(prefix="redis-")
        self._socket = f"{self._sockets.name}/s"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def client(self) -> redis.Redis:
        """Return a client that reaches the server even if its machine is cut off."""
        return redis.Redis(unix_socket_path=self._socket, socket_timeout=10)

    def start(self, primary: "RedisNode | None" = None) -> None:
        """Start the server, as a replica if there is a primary, and wait until it answers."""
        place = ("--port", str(_REDIS_PORT), "--unixsocket", self._socket)
        follows = ("--replicaof", primary.machine.address, str(_REDIS_PORT)) if primary else ()
        words = ("redis-server", *place, "--dir", str(self._folder), *_SETTINGS)
        with (self._folder / "log").open("ab") as log:
            self._process = self.machine.start(
                *words, *self._flags, *follows, stdout=log, stderr=log
            )
        eventually(self._answers)

    def kill(self) -> None:
        self.machine.kill()
        if self._process is not None:
            self._process.wait()

    def follow(self, primary: "RedisNode | None") -> None:
        """Become a replica of another server, or a primary."""
        words = (primary.machine.address, str(_REDIS_PORT)) if primary else ("NO", "ONE")
        with self.client as client:
            client.execute_command("REPLICAOF", *words)  # type: ignore[no-untyped-call]

    def is_in_sync(self) -> bool:
        """Return whether this replica is connected with its primary."""
        with contextlib.suppress(redis.RedisError), self.client as client:
            return bool(client.info("replication").get("master_link_status") == "up")
        return False

    def _answers(self) -> bool:
        assert self._process is not None and self._process.poll() is None
        with contextlib.suppress(redis.RedisError), self.client as client:
            return bool(client.ping())
        return False


class GatewayNode:
    """A gateway with its engine on its own machine, and the relay through which it uses Redis."""

    def __init__(
        self,
        machine: Machine,
        folder: Path,
        model: Path | str,
        redis_host: str,
        flags: tuple[str, ...],
    ) -> None:
        self.machine = machine
        self._folder = folder / machine.name
        self._folder.mkdir(parents=True)
        self._clock = self._folder / "clock"
        self.set_clock(0)
        self._redis_host = redis_host
        self._control = self._folder / "relay"
        self._relay: subprocess.Popen[bytes] | None = None
        # Only the wall clock can jump; the monotonic clock, which measures durations, does not.
        library = folder / "clock.so"
        if not library.exists():
            build = ["cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(_CLOCK)]
            subprocess.run(build, check=True)
        moved = ("env", f"LD_PRELOAD={library}", f"CLOCK_OFFSET={self._clock}")
        prefix = (*machine.prefix, *moved)
        state = f"redis://127.0.0.1:{_RELAY_PORT}/0"
        self.site = Site(model, state, flags, prefix, machine.address)

    def start(self) -> None:
        """Start the relay and the gateway, and do not wait for the gateway."""
        self.start_relay()
        self.site.launch()

    def end(self, number: signal.Signals) -> int:
        """Send the signal to the gateway's server; return the exit code."""
        return self.site.server.stop(number)

    def is_healthy(self) -> bool:
        """Return whether the gateway answers and has an engine."""
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"http://{self.address}/health").status_code == 200
        return False

    def start_relay(self) -> None:
        """Start the relay if it is not running."""
        if self._relay is None or self._relay.poll() is not None:
            self._control.unlink(missing_ok=True)
            words = (str(_RELAY_PORT), self._redis_host, str(_REDIS_PORT), str(self._control))
            self._relay = self.machine.start(sys.executable, "-m", "stress.cluster.relay", *words)
            eventually(self._control.exists)

    def set_clock(self, seconds: int) -> None:
        """Let the wall clock of the gateway's processes differ from the real time by `seconds`."""
        # The processes have mapped the file, so it must not be truncated.
        with self._clock.open("r+b" if self._clock.exists() else "wb") as file:
            file.write(struct.pack("<q", seconds))

    async def set_weather(self, weather: Weather) -> None:
        """Change how bytes travel between this gateway and Redis."""
        await command(self._control, weather)

    @property
    def address(self) -> str:
        return f"{self.site.host}:{self.site.port}"


class Machines:
    """The cluster. The network that contains the cluster ends its processes."""

    def __init__(
        self,
        network: Network,
        folder: Path,
        model: Path | str,
        flags: tuple[str, ...] = FLAGS,
        num_gateways: int = 3,
        redis_flags: Iterable[str] = (),
        keys: Sequence[str] = (),
    ) -> None:
        """Create the machines.

        If there are `keys`, the balancer adds the first key to each request without an API key.
        """
        if keys:
            key_file = folder / "keys"
            key_file.touch(0o600)
            key_file.write_text("".join(f"{key}\n" for key in keys))
            flags = (*flags, "--api-key-file", str(key_file))
        self._key = keys[0] if keys else None
        self.network = network
        self.clients = network.add("clients")
        self.balancer_machine = network.add("balancer")
        stores = [RedisNode(network.add(f"redis{i}"), folder, redis_flags) for i in (1, 2)]
        self.primary, self.replica = stores
        self.redis_address = network.spare_address()
        network.give(self.redis_address, self.primary.machine)
        self.gateways = [
            GatewayNode(network.add(f"gateway{i}"), folder, model, self.redis_address, flags)
            for i in range(1, num_gateways + 1)
        ]
        self.host, self.port = self.balancer_machine.address, _BALANCER_PORT
        self._folder = folder
        # The names of the gateways by their ids in Redis; a gateway has a new id after each start.
        self._names: dict[str, str] = {}

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def start_services(self) -> None:
        """Start Redis, its replica, the relays and HAProxy."""
        self.primary.start()
        self.replica.start(self.primary)
        eventually(self.replica.is_in_sync)
        for gateway in self.gateways:
            gateway.start_relay()
        gateways = [gateway.address for gateway in self.gateways]
        prefix = self.balancer_machine.prefix
        Balancer(f"{self.host}:{self.port}", gateways, self._folder, prefix, self._key)

    def writer_of(self, stream_id: str) -> GatewayNode | None:
        """Return the gateway that writes the stream, or None if the stream has ended."""
        with self.primary.client as client:
            for lease in client.scan_iter("headrace:g:*"):
                if about := client.get(lease):
                    assert isinstance(about, bytes)
                    self._names[lease.decode().rpartition(":")[2]] = json.loads(about)["name"]
            gateway, ended = client.hmget(f"headrace:s:{stream_id}", ["gateway", "ended"])  # type: ignore[misc]
        if gateway is None or ended is not None:
            return None
        # All machines have the same host name, so only the ports differ.
        port = int(self._names[gateway.decode()].rpartition(":")[2])
        return next(it for it in self.gateways if it.site.port == port)

    def fail_over(self) -> None:
        """Make the replica the primary, as an operator does if the old primary is unreachable."""
        self.primary, self.replica = self.replica, self.primary
        self.primary.follow(None)
        self.network.give(self.redis_address, self.primary.machine)

    def switch_over(self) -> None:
        """Make the replica the primary as an operator does for maintenance: nothing is lost."""
        with self.primary.client as client:
            client.execute_command("FAILOVER")  # type: ignore[no-untyped-call]
        self.primary, self.replica = self.replica, self.primary
        eventually(self.replica.is_in_sync)
        self.network.give(self.redis_address, self.primary.machine)

    async def calm(self) -> None:
        """Remove all faults of the network, the relays and the clocks."""
        self.network.heal()
        for gateway in self.gateways:
            gateway.set_clock(0)
            with contextlib.suppress(OSError):
                await gateway.set_weather(CALM)
