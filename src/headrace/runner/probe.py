"""What this machine has: cores and free memory."""

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


def _container_bytes() -> int:
    """What a control group (a container) leaves; without a limit, more than any machine has."""
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if not limit.is_file() or limit.read_text().strip() == "max":
        return 1 << 60
    return max(0, int(limit.read_text()) - int(used.read_text()))
