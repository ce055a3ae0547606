"""Reads the number of cores and the free memory of this machine."""

import ctypes
import os
from pathlib import Path
from typing import Literal

import torch

from headrace_common.system.memory_limits import free_group_bytes

# DMI's chassis types of laptops, tablets and similar devices.
_PORTABLE = {"8", "9", "10", "11", "14", "30", "31", "32"}


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def num_threads(wanted: int | Literal["auto"]) -> int:
    """Return the number of compute threads; "auto" means one per core, and one less on a laptop."""
    if wanted != "auto":
        return wanted
    return max(1, num_cores() - is_portable())


def is_portable(system: Path = Path("/sys/class")) -> bool:
    """Return whether this machine is a laptop or similar, judged by its chassis or battery."""
    if _text(system / "dmi" / "id" / "chassis_type") in _PORTABLE:
        return True
    supplies = system.glob("power_supply/*")
    # The battery of a mouse or keyboard has the scope Device.
    return any(
        _text(it / "type") == "Battery" and _text(it / "scope") != "Device" for it in supplies
    )


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def free_bytes(device: torch.device) -> int:
    """Return how many bytes can be allocated now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    meminfo = Path("/proc/meminfo")
    # Without /proc, assume that half of the installed memory is free.
    if not meminfo.is_file():
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    lines = dict(line.split(":") for line in meminfo.read_text().splitlines())
    return min(int(lines["MemAvailable"].split()[0]) << 10, free_group_bytes())


def release_freed_memory() -> None:
    """Return freed memory to the system; otherwise the C library keeps most of the memory."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
