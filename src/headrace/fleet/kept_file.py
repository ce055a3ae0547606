"""Files that outlive the server: whole or not at all, whatever ends it meanwhile."""

import os
from pathlib import Path


def keep_file(file: Path, content: bytes) -> None:
    """Writes it anew, for its owner alone; OSError leaves the old one."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # where streams lie elsewhere
    beside = file.with_suffix(".new")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())
    beside.replace(file)
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
