"""Network namespaces that act as several machines on a virtual switch; links can be cut.

`python -m stress.cluster.network` removes what a crashed run has left. All of this needs root.

The switch is a bridge in a namespace of its own, so nothing is added to the real network. Each
machine has one network card with its own address. `Network.drop` makes a machine send packets for
an address to a hardware address that no machine has. Such packets vanish as on a broken route: the
sender notices nothing, and the other direction still works.
"""

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

_PREFIX = "hrnet-"
_SWITCH = _PREFIX + "switch"
_NETWORK = "10.77.0."
_NOWHERE = "02:00:00:00:00:01"
_LOCK = Path(tempfile.gettempdir()) / "headrace-network.lock"
_CLONE_NEWNET = 0x40000000


class NetworkError(Exception):
    """Raised if a command of `ip` or `tc` fails."""


class Machine:
    """A machine of the network. Its processes see only its own network card and loopback."""

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.address = f"{_NETWORK}{number}"
        self.space = _PREFIX + name
        # The switch's end of the machine's cable.
        self.port = f"port{number}"

    @property
    def prefix(self) -> tuple[str, ...]:
        """The command that executes its arguments on this machine, in the same process."""
        return ("ip", "netns", "exec", self.space)

    def start(self, *command: str, **options: Any) -> "subprocess.Popen[bytes]":
        """Start a process on this machine; `options` are those of Popen."""
        return subprocess.Popen([*self.prefix, *command], **options)

    def pids(self) -> list[int]:
        """Return the processes that run on this machine."""
        found = subprocess.run(
            ["ip", "netns", "pids", self.space], capture_output=True, text=True, check=False
        )
        return [int(pid) for pid in found.stdout.split() if int(pid) != os.getpid()]

    def signal(self, number: signal.Signals) -> int:
        """Send a signal to all processes of this machine; return their number."""
        num = 0
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
                num += 1
        return num

    def kill(self) -> int:
        """Kill all processes at once, as a power cut does; return their number."""
        # A stopped process starts no new processes, so none can escape.
        num = self.signal(signal.SIGSTOP)
        self.signal(signal.SIGKILL)
        return num

    def pause(self) -> None:
        """Stop all processes, as when a machine is suspended or migrated."""
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let paused processes run again."""
        self.signal(signal.SIGCONT)

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Move this thread to the machine, with the sockets, threads and processes that it opens.

        Existing sockets and threads stay where they are.
        """
        with open(f"/proc/self/task/{threading.get_native_id()}/ns/net") as before:
            with open(f"/run/netns/{self.space}") as there:
                _move_to(there)
            try:
                yield
            finally:
                _move_to(before)


class Network:
    """The switch and its machines; only one network exists at a time.

    Use the network as a context manager, which kills its processes at the end.
    """

    def __init__(self) -> None:
        self.machines: dict[str, Machine] = {}
        self._lock: IO[str]

    def __enter__(self) -> "Network":
        self._lock = _LOCK.open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise NetworkError("Another network of machines is in use; wait for its end.") from None
        _remove()
        _ip("netns", "add", _SWITCH)
        _ip("-n", _SWITCH, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", _SWITCH, "link", "set", "bridge0", "up")
        return self

    def __exit__(self, *error: object) -> None:
        _remove()
        self._lock.close()

    def add(self, name: str) -> Machine:
        """Add a machine, and connect it with the switch."""
        machine = Machine(name, 10 + len(self.machines))
        space, port = machine.space, machine.port
        _ip("netns", "add", space)
        peer = ("peer", "name", "eth0", "netns", space)
        _ip("-n", _SWITCH, "link", "add", port, "type", "veth", *peer)
        _ip("-n", _SWITCH, "link", "set", port, "master", "bridge0")
        _ip("-n", _SWITCH, "link", "set", port, "up")
        _ip("-n", space, "address", "add", f"{machine.address}/24", "dev", "eth0")
        _ip("-n", space, "link", "set", "lo", "up")
        _ip("-n", space, "link", "set", "eth0", "up")
        self.machines[name] = machine
        return machine

    def cut(self, machine: Machine) -> None:
        """Pull the machine's cable."""
        _ip("-n", _SWITCH, "link", "set", machine.port, "down")

    def drop(self, source: Machine, target: str) -> None:
        """Lose all packets from one machine to an address; the other direction still works."""
        where = ("to", target, "lladdr", _NOWHERE, "dev", "eth0", "nud", "permanent")
        _ip("-n", source.space, "neigh", "replace", *where)

    def part(self, one: Machine, other: Machine) -> None:
        """Lose all packets between two machines."""
        self.drop(one, other.address)
        self.drop(other, one.address)

    def limit(self, machine: Machine, rate: str) -> None:
        """Limit what the machine receives, for instance to `64kbit` per second."""
        qdisc = ("tbf", "rate", rate, "burst", "16kb", "latency", "400ms")
        _run("tc", "-n", _SWITCH, "qdisc", "replace", "dev", machine.port, "root", *qdisc)

    def heal(self) -> None:
        """Connect all cables, and remove all losses and limits."""
        for machine in self.machines.values():
            _ip("-n", _SWITCH, "link", "set", machine.port, "up")
            _ip("-n", machine.space, "neigh", "flush", "nud", "permanent")
            delete = ("qdisc", "del", "dev", machine.port, "root")
            subprocess.run(["tc", "-n", _SWITCH, *delete], capture_output=True, check=False)

    def give(self, address: str, to: Machine) -> None:
        """Give a further address to one machine, and take it from the others.

        All machines learn of the move, as they would if a real machine announced the address.
        """
        for machine in self.machines.values():
            if machine is not to and address in _ip("-n", machine.space, "address"):
                _ip("-n", machine.space, "address", "del", f"{address}/32", "dev", "eth0")
        _ip("-n", to.space, "address", "replace", f"{address}/32", "dev", "eth0")
        for machine in self.machines.values():
            # A loss between two machines stays a loss.
            if "PERMANENT" not in _ip("-n", machine.space, "neigh", "show", address):
                _ip("-n", machine.space, "neigh", "flush", "to", address)

    def spare_address(self) -> str:
        """Return an address of the network that `add` gives to no machine."""
        return f"{_NETWORK}100"


def can_make_networks() -> bool:
    """Return whether this process may make network namespaces."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        return False
    probe = f"{_PREFIX}probe{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, check=False)
    subprocess.run(["ip", "netns", "del", probe], capture_output=True, check=False)
    return made.returncode == 0


def remove() -> None:
    """Remove the namespaces that a crashed run has left, and kill the processes in them.

    Raises NetworkError if a run still uses the network.
    """
    with _LOCK.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise NetworkError("A network of machines is in use.") from None
        _remove()


def _remove() -> None:
    for line in _ip("netns", "list").splitlines():
        space = line.split()[0]
        if space.startswith(_PREFIX):
            Machine(space.removeprefix(_PREFIX), 0).kill()
            _ip("netns", "del", space)


def _move_to(space: IO[str]) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(space.fileno(), _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def _ip(*words: str) -> str:
    return _run("ip", *words)


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NetworkError(f"{' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


if __name__ == "__main__":
    remove()
