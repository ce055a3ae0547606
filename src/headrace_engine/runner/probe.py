"""The cores and the free memory of this machine."""

import ctypes
import os
from pathlib import Path
from typing import Literal, NamedTuple

import torch

_UNLIMITED = 1 << 60


_PORTABLE = {"8", "9", "10", "11", "14", "30", "31", "32"}  # chassis of DMI: laptops, tablets, …


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def num_threads(wanted: int | Literal["auto"]) -> int:
    """Compute threads. auto: as many as cores, on a laptop one less: somebody sits before it."""
    if wanted != "auto":
        return wanted
    return max(1, num_cores() - is_portable())


def is_portable(system: Path = Path("/sys/class")) -> bool:
    """Whether this is a laptop or its like, by its chassis or its battery."""
    if _text(system / "dmi" / "id" / "chassis_type") in _PORTABLE:
        return True
    supplies = system.glob("power_supply/*")
    # the battery of a mouse has the scope of its device
    return any(
        _text(it / "type") == "Battery" and _text(it / "scope") != "Device" for it in supplies
    )


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def free_bytes(device: torch.device) -> int:
    """Memory that can be taken now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    if not meminfo.is_file():  # not Linux: half of what is built in
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    lines = dict(line.split(":") for line in meminfo.read_text().splitlines())
    return min(int(lines["MemAvailable"].split()[0]) << 10, _container_bytes())


def give_back_freed() -> None:
    """Return freed memory to the system, where the C library can; it would keep most of it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class _GroupFiles(NamedTuple):
    """The names by which a version of control groups tells of memory."""

    limit: str
    used: str
    inactive: str  # in memory.stat: cached files that are given up first


_V1 = _GroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _GroupFiles("memory.max", "memory.current", "inactive_file")


def _container_bytes(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> int:
    """Free bytes of the control groups that hold this process, its container's among them.

    Without a limit, more than any machine has.
    """
    free = [_left(root, _V2)]
    for line in own.read_text().splitlines() if own.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        files = _V1 if controllers else _V2
        base = root / "memory" if controllers else root
        inner = [part for part in path.split("/") if part and part != ".."]
        free += [_left(base.joinpath(*inner[:depth]), files) for depth in range(len(inner) + 1)]
    return min(free)


def _left(group: Path, files: _GroupFiles) -> int:
    """Free bytes of one group. It counts cached files, a model's among them; they count as free."""
    try:
        limit = (group / files.limit).read_text().strip()
        used = int((group / files.used).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:  # the root has no limit, and a container sees no group outside it
        return _UNLIMITED
    if limit == "max":
        return _UNLIMITED
    return max(0, int(limit) - max(0, used - int(stat.get(files.inactive, 0))))
