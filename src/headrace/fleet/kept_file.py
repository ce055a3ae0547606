"""Files that outlive the server: whole or not at all, whatever ends it meanwhile."""

import asyncio
import os
from pathlib import Path

from headrace_common.system.race import uncut
from headrace_common.system.state_files import drop_partial, make_way

_PATIENCE_S = 5.0  # a disk may never answer


class KeptFile:
    """A file that is written by one at a time, in the order of asking."""

    def __init__(self, path: Path) -> None:
        self._path = path
        drop_partial(_beside(path))
        self._turn = asyncio.Lock()

    async def keep(self, content: bytes) -> None:
        """OSError leaves the old one; cancelled, it ends after the write, which none overtakes."""
        async with self._turn:
            await uncut(asyncio.to_thread(keep_file, self._path, content), _PATIENCE_S)


def keep_file(file: Path, content: bytes) -> None:
    """Writes it anew, for its owner alone; OSError leaves the old one."""
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)  # where streams lie elsewhere
    beside = _beside(file)
    make_way(beside)
    try:
        descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        beside.replace(file)
    except OSError:
        drop_partial(beside)
        raise
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _beside(file: Path) -> Path:
    return file.with_suffix(".new")
