"""Reads small files of a model's folder, and refuses pipes, devices and oversized files."""

import os
import stat
from pathlib import Path

MAX_BYTES = 32 << 20  # the longest indexes of shards have a few MiB


def read_small(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Return the content; OSError if it is not a regular file, cannot be read or is longer.

    A pipe is opened without waiting for its writer, and a device is never read: both could take
    for ever.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(0, "not a regular file")
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(0, f"more than {max_bytes:,} bytes")
    return content
