"""Files that processes of this machine share and no other program sees; gone with their owners."""

import os
import tempfile
from pathlib import Path


def open_memory_file(name: str) -> int:
    """A new file without a name, in memory where the system can (Linux), else on disk."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(f"headrace-{name}")
    with tempfile.TemporaryFile(prefix=f"headrace-{name}-") as file:
        return os.dup(file.fileno())


def can_open_anew() -> bool:
    """Whether an inherited file can be opened as one with locks of its own."""
    return Path("/proc/self/fd").is_dir()
