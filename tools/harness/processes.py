"""Reads processes from /proc. An ended process has no children, no memory and no time."""

import contextlib
import socket
from pathlib import Path


def children(pid: int) -> list[int]:
    """Return the children that any of the process's threads started."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def descendants(pid: int) -> list[int]:
    """Return the children of a process, and their descendants."""
    return [one for child in children(pid) for one in (child, *descendants(child))]


def command(pid: int) -> bytes:
    """Return a process's arguments, each followed by a zero byte; empty for an ended process."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def is_engine(pid: int) -> bool:
    return b"headrace_engine.process" in command(pid)


def engines(pid: int) -> list[int]:
    """Return the engine processes, which are children of the server's process."""
    return [child for child in children(pid) if is_engine(child)]


def parent(pid: int) -> int:
    """Return the parent of a process, or 0 if there is none."""
    return int(_stat(pid)[1])


def ticks(pid: int) -> int:
    """Return the processor ticks that a process has used."""
    return sum(map(int, _stat(pid)[11:13]))


def proportional_bytes(pid: int) -> int:
    """Return a process's memory in bytes. Shared memory counts in proportion to its users (PSS)."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    return 0


def _stat(pid: int) -> list[str]:
    """Return the fields after the process name, which may contain spaces."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["0"] * 13


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
