"""Chooses the default folder of cached prefixes, and how much of the disk that folder may take."""

from pathlib import Path

from headrace_common.system.file_systems import (
    IN_MEMORY,
    ON_NETWORK,
    cache_folder,
    kind_of,
    nearest_existing,
)

AUTO, NONE = "auto", "none"
# By default, prefixes take at most this fraction of the space that the disk would have without
# them. The fraction is small, because nobody asked for these files: other programs should never
# miss the space. The limit is computed again for each sweep, so the folder shrinks while the disk
# fills.
_SHARE = 0.1
# More would not help much: 10 GiB are 80,000 tokens of a model with 8 billion parameters.
_MOST_BYTES = 10 << 30
# Below this limit nothing is stored: one long prompt would displace all others.
_LEAST_BYTES = 512 << 20
# The limit of a folder that the user has named.
_NAMED_BYTES = 20 << 30


def default_folder() -> Path:
    """Return the default folder. Raise RuntimeError if the user has no home folder."""
    return cache_folder("prefixes")


def objection(root: Path) -> str:
    """Return why `root` is a bad default folder, or "".

    In memory, prefixes would take memory from the models. On a network file system, the free
    space does not show the user's quota.
    """
    kind = kind_of(nearest_existing(root))
    if kind in IN_MEMORY:
        return "is in memory, not on a disk"
    return "is on a network file system" if kind in ON_NETWORK else ""


def size_limit(is_default: bool, given: int | None, free_bytes: int, used_bytes: int) -> int:
    """Return the largest size of the folder in bytes; 0 if nothing should be stored.

    `given` is the configured limit. `free_bytes` are free on the disk now, and the folder contains
    `used_bytes`.
    """
    if given is not None or not is_default:
        return given or _NAMED_BYTES
    share = min(_MOST_BYTES, int(_SHARE * (free_bytes + used_bytes)))
    return share if share >= _LEAST_BYTES else 0
