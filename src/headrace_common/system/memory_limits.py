"""Reads the machine's memory, and the limits that control groups such as containers set."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_UNLIMITED = 1 << 60
_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")


class _GroupFiles(NamedTuple):
    """The names of the memory files of control groups, in version 1 or version 2."""

    limit: str
    used: str
    # The key in memory.stat for inactive file pages, which the system drops first.
    inactive: str


_V1 = _GroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _GroupFiles("memory.max", "memory.current", "inactive_file")


def installed_bytes(root: Path = _ROOT, own: Path = _OWN) -> int:
    """Return the size of this machine's memory, or the limit of a control group if it is lower."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(total, *(_limit_bytes(*group) for group in _own_groups(root, own)))


def free_group_bytes(root: Path = _ROOT, own: Path = _OWN) -> int:
    """Return the free bytes in the control groups of this process, including the container's.

    Without a limit, the result is larger than the memory of any machine.
    """
    return min(_free_bytes(*group) for group in _own_groups(root, own))


def _own_groups(root: Path, own: Path) -> Iterator[tuple[Path, _GroupFiles]]:
    """Yield the folders of this process's control groups, from the outermost to the innermost."""
    yield root, _V2
    for line in own.read_text().splitlines() if own.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        files = _V1 if controllers else _V2
        base = root / "memory" if controllers else root
        inner = [part for part in path.split("/") if part and part != ".."]
        for depth in range(len(inner) + 1):
            yield base.joinpath(*inner[:depth]), files


def _limit_bytes(group: Path, files: _GroupFiles) -> int:
    try:
        limit = (group / files.limit).read_text().strip()
    # The root group has no limit, and a container cannot read groups outside the container.
    except OSError:
        return _UNLIMITED
    return _UNLIMITED if limit == "max" else int(limit)


def _free_bytes(group: Path, files: _GroupFiles) -> int:
    """Return the free bytes of one control group; cached files count as free."""
    limit = _limit_bytes(group, files)
    try:
        used = int((group / files.used).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        return _UNLIMITED
    if limit == _UNLIMITED:
        return _UNLIMITED
    return max(0, limit - max(0, used - int(stat.get(files.inactive, 0))))
