"""A Redis server on the simulated network. fakeredis runs its commands and the product's scripts.

The gateways connect with the real client. The model also checks each append to a log, independently
of the scripts: one gateway appends per epoch, epochs never fall, and a log only grows.

A failover replaces the data by what a replica has: the state of some seconds ago. Redis answers
before its replica has a write, and the server uses neither WAIT nor `min-replicas-to-write`. After
a failover,

- a client sees no token twice, in another order or changed while its connection stays open;
- a stream or batch whose writes were lost may vanish, end with an error or continue from the older
  state, but its client is never left without an answer;
- a line of such a batch still has at most one result, with the right answer;
- nothing leaks, later requests are served, and keys stay isolated.

`lost` has the ids of these streams, batches and files. Everything else is checked as always.
"""

import asyncio
import copy
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable
from contextvars import copy_context
from typing import Any, NamedTuple

from detangle import choice, uniform
from fakeredis._clients._tcp_server import encode_reply
from fakeredis._core import FakeServer
from fakeredis._socket._fakesocket import FakeSocket
from redis import Redis

from stress.simulated_server.faults import Faults
from stress.simulated_server.system import world_loop

HOST, PORT = "redis", 6379
URL = f"redis://{HOST}:{PORT}/0"
_PREFIX = b"headrace:"
_BATCHES = _PREFIX + b"batches:"
_CLAIMS, _BLOBS = _BATCHES + b"claim:", _BATCHES + b"blob:"
_numbers = itertools.count(1)

NUM_KEPT = 32
"""A gateway keeps at least this many events of each stream that it writes."""


class Append(NamedTuple):
    """One entry of a log, as the model saw it."""

    entry: bytes
    data: bytes


class Replica(NamedTuple):
    """The data that a replica has, and the checks of logs as they were at that time."""

    data: dict[bytes, Any]
    logs: dict[bytes, list[Append]]
    writers: dict[tuple[bytes, int], str]
    epochs: dict[bytes, int]


class RedisModel:
    """The server and its data, which outlives a restart."""

    def __init__(self, faults: Faults, counts: Counter[str]) -> None:
        self.faults, self.counts = faults, counts
        self.data = FakeServer(version=(7, 4))
        # All appends to each log since its creation, by the log's key.
        self.logs: defaultdict[bytes, list[Append]] = defaultdict(list)
        # The host that appends, by stream and epoch.
        self._writers: dict[tuple[bytes, int], str] = {}
        self._epochs: dict[bytes, int] = {}
        # The appends that break a rule. The model answers them nevertheless, as a real Redis does.
        self._problems: list[str] = []
        self._listener: Any = None
        self._clients: dict[_Client, None] = {}
        # Bytes in both directions that wait until the server runs again; None while it runs.
        self._waiting: list[Callable[[], None]] | None = None
        self._num_stalls = 0
        # Whether a failover is about to happen.
        self._fails_over = False
        # Ids of streams, batches and files whose writes a failover has lost.
        self.lost: set[str] = set()
        # Called after a command of a gateway for a batch that this gateway runs; the flag says
        # whether the command wrote something.
        self.on_batch_command: Callable[[str, bool], None] = lambda host, is_write: None
        # Called after a failover with the streams whose writers can store the lost events again.
        self.on_failover: Callable[[set[str]], None] = lambda ids: None
        # Called when the server runs again after a stall.
        self.on_recovered: Callable[[], None] = lambda: None

    async def start(self) -> None:
        """Start the process, unless it runs."""
        self._context = copy_context()
        loop = asyncio.get_running_loop()
        if self._listener is None:
            self._listener = await loop.create_server(lambda: _Client(self), HOST, PORT)

    def stop(self) -> None:
        """End the process: its connections break, and its scripts are forgotten."""
        if self._listener is not None:
            self._listener.close()
        self._listener = None
        for client in list(self._clients):
            client.drop()
        self.data.script_cache.clear()
        self._waiting = None

    def restart(self, seconds: float) -> None:
        """End the process, and start it again after some time."""
        self.stop()

        async def start_again() -> None:
            await asyncio.sleep(seconds)
            await self.start()
            self.on_recovered()

        world_loop().create_task(start_again(), name="redis", context=self._context)

    def fail_over(self, lag_s: float) -> None:
        """Let the replica replace the server in `lag_s` seconds, without the writes until then."""
        if self._fails_over:
            return
        self._fails_over = True
        world_loop().call_later(lag_s, self._promote, self._replica())

    def _replica(self) -> Replica:
        return Replica(
            {key: copy.deepcopy(item) for key, item in self._database()._dict.items()},
            {key: list(appends) for key, appends in self.logs.items()},
            dict(self._writers),
            dict(self._epochs),
        )

    def _promote(self, replica: Replica) -> None:
        self._fails_over = False
        self.faults.note("redis: failover")
        lost = _ids_of_changes(self._database()._dict, replica.data)
        self.counts["failovers that lost writes"] += bool(lost)
        self.lost |= lost
        self.faults.tell(f"the replica lacks writes for {sorted(lost)}")
        data = self._database()._dict
        self.on_failover({id for id in lost if _can_be_mended(id, data, replica.data)})
        database = self._database()
        database._dict.clear()
        # This also schedules the expirations.
        database.update(replica.data)
        self.logs = defaultdict(list, replica.logs)
        self._writers, self._epochs = replica.writers, replica.epochs
        self.restart(uniform(0.1, 5.0))

    def stall(self, seconds: float) -> None:
        """Do nothing for some time, as a server whose disk is slow does. Nothing is lost."""
        self._waiting = [] if self._waiting is None else self._waiting
        self._num_stalls += 1
        world_loop().call_later(seconds, self._go_on, self._num_stalls)

    def _go_on(self, number: int) -> None:
        if number != self._num_stalls or self._waiting is None:
            return
        self.on_recovered()
        waiting, self._waiting = self._waiting, None
        for work in waiting:
            self.do(work)

    def do(self, work: Callable[[], None]) -> None:
        """Do something with a connection now, or once the server runs again."""
        if self._waiting is None:
            work()
        else:
            self._waiting.append(work)

    def publish(self, channel: str, message: bytes) -> None:
        """Publish a message, as another gateway does."""
        for client in list(self._clients)[:1]:
            client._socket.publish(_PREFIX + channel.encode(), message)

    def _database(self) -> Any:
        return self.data.dbs[0]

    # The methods below read the data, for checks.

    def field(self, id: str, name: str) -> str:
        """Return a field of a stream's hash; "" if there is none."""
        item = self._database()._dict.get(_PREFIX + b"s:" + id.encode())
        value = item.value.get(name.encode()) if item else None
        return value.decode() if value else ""

    def live(self) -> list[str]:
        """Return the ids of the live streams."""
        item = self._database()._dict.get(_PREFIX + b"live")
        return [id.decode() for id in item.value] if item else []

    def keys(self, prefix: str) -> list[str]:
        """Return all keys that begin with `prefix`, without the prefix of all keys."""
        start = _PREFIX + prefix.encode()
        found = self._database()
        names = [it for it in list(found._dict) if it.startswith(start) and it in found]
        return sorted(it.removeprefix(_PREFIX).decode() for it in names)

    def check_logs(self) -> int:
        """Compare the stored logs with the appends that the model saw; return their number."""
        assert not self._problems, self._problems[0]
        num = 0
        for key, appends in self.logs.items():
            item = self._database()._dict.get(key)
            # A deleted stream has no log.
            if item is None:
                continue
            num += 1
            entries = item.value._values_dict.items()
            stored = [Append(entry.encode(), fields[1]) for entry, fields in entries]
            assert stored == appends, f"{key!r} was changed"
        return num

    def appended(self, host: str, key: bytes, entry: bytes, data: bytes) -> None:
        """Check an append: each epoch has one writer, and a log has no gap."""
        id = key.removeprefix(_PREFIX + b"l:")
        epoch = int(self.field(id.decode(), "epoch"))
        writer = self._writers.setdefault((id, epoch), host)
        if writer != host:
            self._problems.append(f"{host} and {writer} write {id!r} in epoch {epoch}")
        if epoch < self._epochs.get(id, 0):
            self._problems.append(f"{host} writes {id!r} in epoch {epoch}, which has ended")
        self.counts["takeovers"] += epoch > self._epochs.get(id, 1)
        self._epochs[id] = epoch
        self.logs[key].append(Append(entry, data))


def _ids_of_changes(before: dict[bytes, Any], after: dict[bytes, Any]) -> set[str]:
    """Return the ids of the streams, batches and files that differ."""
    changed = set()
    for key in before.keys() | after.keys():
        one, other = (_fields(it[key].value) if key in it else {} for it in (before, after))
        kind, _, name = key.removeprefix(_PREFIX).partition(b":")
        if kind in (b"s", b"l") and one != other:
            changed.add(name)
        elif key.startswith(_BLOBS) and one != other:
            changed.add(key.removeprefix(_BLOBS).partition(b":")[0])
        elif kind == b"batches":
            fields = one.keys() | other.keys()
            changed |= {field for field in fields if one.get(field) != other.get(field)}
    return {id.decode() for id in changed} - {""}


def _can_be_mended(id: str, before: dict[bytes, Any], after: dict[bytes, Any]) -> bool:
    """Return whether a replica only lacks events that the writer of a stream keeps in memory."""
    key = _PREFIX + b"s:" + id.encode()
    one, other = (_fields(it[key].value) if key in it else {} for it in (before, after))
    if not one or not other or b"ended" in one:
        return False
    num_lost = int(one.pop(b"next")) - int(other.pop(b"next"))
    return one == other and num_lost <= NUM_KEPT


def _fields(value: Any) -> dict[bytes, Any]:
    """Return the fields of a hash, or a text or a log as the only field."""
    if hasattr(value, "_values"):
        return dict(value._values)
    return {b"": dict(value._values_dict) if hasattr(value, "_values_dict") else value}


class _Client(asyncio.Protocol):
    """A connection of a client."""

    def __init__(self, model: RedisModel) -> None:
        self.model = model
        self.is_open = True

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self.host = transport.get_extra_info("peername")[0]
        self.model._clients[self] = None
        self._socket = _Socket(self)

    def data_received(self, data: bytes) -> None:
        self.model.do(lambda: self._take(data))

    def connection_lost(self, error: BaseException | None) -> None:
        self.model.do(self._end)

    def drop(self) -> None:
        """Break the connection."""
        self._transport.abort()
        self._end()

    def answer(self, value: Any) -> None:
        data = encode_reply(value, 2)
        self.model.do(lambda: self._transport.write(data))

    def _take(self, data: bytes) -> None:
        if self.is_open:
            self._socket.sendall(data)

    def _end(self) -> None:
        if self.is_open:
            self.is_open = False
            self.model._clients.pop(self, None)
            self._socket.kill()


class _Socket(FakeSocket):
    """fakeredis's side of a connection."""

    def __init__(self, client: _Client) -> None:
        self._number = next(_numbers)
        self._client = client
        super().__init__(client.model.data, 0, set(), Redis, client_info={"protocol_version": 2})

    def __hash__(self) -> int:
        # Sets of subscribers must have the same order in every run.
        return self._number

    def put_response(self, msg: Any) -> None:
        if isinstance(msg, list) and b"taken" in msg:
            self._client.model.counts["appends refused after a takeover"] += 1
        if self._client.is_open:
            self._client.answer(msg)

    def _process_command(self, fields: list[bytes]) -> None:
        client, faults = self._client, self._client.model.faults
        if not client.is_open:
            return
        if faults.hits("redis: connection lost before a command"):
            client.drop()
            return
        key = fields[3] if fields[0] == b"EVAL" else fields[1] if len(fields) > 1 else b""
        # Each gateway lists the open batches once a second.
        is_for_batch = key.startswith(_BATCHES) and fields[0] != b"HVALS"
        is_write = fields[0] == b"EVAL" and not key.startswith(_CLAIMS)
        ends = key.startswith(_BLOBS) and faults.hits("redis: restarts after a file's write")
        if ends or faults.hits("redis: connection lost before an answer"):
            client.is_open = False
            super()._process_command(fields)
            client.is_open = True
            client.drop()
            if ends:
                client.model.restart(uniform(1.0, 5.0))
            return
        if fields[0] == b"CONFIG":
            client.answer([fields[2], _SETTINGS.get(fields[2], b"")])
            return
        if faults.hits("redis: failover after a command"):
            client.model.fail_over(choice((0.0, uniform(0.0, 1.0))))
        if faults.hits("redis: stalls"):
            client.model.stall(uniform(0.1, 6.0))
        super()._process_command(fields)
        if is_for_batch:
            client.model.on_batch_command(client.host, is_write)

    def _get_server_runtime(self, server: FakeServer) -> Any:
        runtime = super()._get_server_runtime(server)
        cached = server.__dict__.get("cached_runtime")
        if cached is None:
            cached = server.__dict__["cached_runtime"] = _Runtime(runtime)
        return cached

    def smembers(self, key: Any) -> list[bytes]:
        # The order of Python's sets differs between processes.
        return sorted(super().smembers(key))

    def xadd(self, key: Any, *args: bytes) -> bytes | None:
        added: bytes | None = super().xadd(key, *args)
        self._client.model.appended(self._client.host, key.key, args[0], args[-1])
        return added


_SETTINGS = {b"appendonly": b"yes", b"appendfsync": b"always", b"maxmemory": b"0"}


class _Runtime:
    """A Lua runtime that compiles each script once."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._compiled: dict[bytes, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def execute(self, script: bytes | str) -> Any:
        if isinstance(script, str):
            # fakeredis collects garbage after each script, which takes longer than most scripts.
            return None
        found = self._compiled.get(script)
        if found is None:
            found = self._compiled[script] = self._runtime.compile(script)
        return found()
