"""Processes as /proc shows them; one that has gone has no children, no memory and no time."""

import contextlib
import socket
from pathlib import Path


def children(pid: int) -> list[int]:
    """Children that any of its threads started."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def descendants(pid: int) -> list[int]:
    """Children, and theirs."""
    return [one for child in children(pid) for one in (child, *descendants(child))]


def command(pid: int) -> bytes:
    """Its arguments, each ended by a zero; empty if it has gone."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def is_engine(pid: int) -> bool:
    return b"headrace_engine.process" in command(pid)


def engines(pid: int) -> list[int]:
    """The engines among a server's children."""
    return [child for child in children(pid) if is_engine(child)]


def parent(pid: int) -> int:
    """0 if there is none."""
    return int(_stat(pid)[1])


def ticks(pid: int) -> int:
    """Processor ticks that it has used."""
    return sum(map(int, _stat(pid)[11:13]))


def proportional_bytes(pid: int) -> int:
    """Its memory; what is shared counts in part."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    return 0


def _stat(pid: int) -> list[str]:
    """The fields behind its name, which may have spaces."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["0"] * 13


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
