"""Nodes of a Ray cluster on this machine: real raylets with their own port and folder."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tools.harness.eventually import eventually
from tools.harness.processes import command, descendants, free_port, is_engine

LIMIT_S = 240
_FLAGS = ("--num-cpus=2", "--num-gpus=0", "--object-store-memory=80000000", "--block")
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # A server whose engines run in Ray sets this variable, too.
    "RAY_worker_niceness": "0",
}


class RayNode:
    """A `ray start` and all processes that it has started."""

    def __init__(self, *flags: str) -> None:
        ray = Path(sys.executable).with_name("ray")
        self._process = subprocess.Popen(
            [str(ray), "start", *_FLAGS, *flags],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **_QUIET},
            start_new_session=True,
        )

    @classmethod
    def join(cls, address: str) -> "RayNode":
        """Starts a worker node, and waits until it runs."""
        node = cls(f"--address={address}")
        try:
            eventually(lambda: node.raylet is not None, LIMIT_S)
        except BaseException:
            node.stop()
            raise
        return node

    @property
    def raylet(self) -> int | None:
        """The process whose death Ray treats as the death of the node."""
        found = [pid for pid in descendants(self._process.pid) if _program(pid) == "raylet"]
        return found[0] if found else None

    def runs(self, pid: int) -> bool:
        """Return whether an actor of this node started the process."""
        raylet = self.raylet
        return raylet is not None and pid in descendants(raylet)

    def processes(self) -> list[int]:
        """Return the processes of the node."""
        return descendants(self._process.pid)

    def stop(self) -> None:
        for pid in [*descendants(self._process.pid), self._process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()


@contextlib.contextmanager
def two_nodes() -> Iterator[tuple[str, RayNode, RayNode]]:
    """Yields the address of a cluster, its head node and its worker node."""
    address = f"127.0.0.1:{free_port()}"
    # The path of a Unix socket must be short.
    folder = tempfile.mkdtemp(prefix="hr-ray-", dir="/tmp")
    nodes = []
    try:
        head = ("--head", f"--port={address.split(':')[1]}", f"--temp-dir={folder}")
        nodes.append(RayNode(*head, "--include-dashboard=false"))
        eventually(lambda: _answers(address), LIMIT_S)
        eventually(lambda: nodes[0].raylet is not None, LIMIT_S)
        nodes.append(RayNode.join(address))
        yield address, nodes[0], nodes[1]
    finally:
        for node in nodes:
            node.stop()
        shutil.rmtree(folder, ignore_errors=True)


def engines(*nodes: RayNode) -> list[int]:
    """Return the engine processes of these nodes."""
    return [pid for node in nodes for pid in node.processes() if is_engine(pid)]


def _answers(address: str) -> bool:
    host, port = address.split(":")
    with socket.socket() as attempt:
        return attempt.connect_ex((host, int(port))) == 0


def _program(pid: int) -> str:
    return Path(command(pid).split(b"\0")[0].decode()).name
