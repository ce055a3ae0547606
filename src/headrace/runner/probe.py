"""The cores and the free memory of this machine."""

import ctypes
import os
from pathlib import Path

import torch


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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


def _container_bytes(group: Path = Path("/sys/fs/cgroup")) -> int:
    """Free bytes of the control group (container); without a limit, more than any machine has.

    The group counts cached files, a model's among them; they are given up first, so count as free.
    """
    limit = group / "memory.max"
    if not limit.is_file() or limit.read_text().strip() == "max":
        return 1 << 60
    used = int((group / "memory.current").read_text())
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    return max(0, int(limit.read_text()) - max(0, used - int(stat.get("inactive_file", 0))))
