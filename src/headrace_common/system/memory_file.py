"""Creates files in memory that processes of this server share. The files end with the processes."""

import os
import tempfile
from pathlib import Path


def open_memory_file(name: str) -> int:
    """Create a file in memory on Linux, else on disk. The file does not appear in any folder.

    `name` is a label for diagnosis.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(f"headrace-{name}")
    with tempfile.TemporaryFile(prefix=f"headrace-{name}-") as file:
        return os.dup(file.fileno())


def can_open_anew() -> bool:
    """Whether an inherited file can be opened again, with separate locks."""
    return Path("/proc/self/fd").is_dir()
