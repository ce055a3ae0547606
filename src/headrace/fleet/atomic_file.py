"""Writes small state files atomically: a crash leaves either the old or the new content."""

import asyncio
import os
from pathlib import Path

from headrace_common.system.race import uncut
from headrace_common.system.state_files import drop_partial, make_way, sync_folder

# Maximum number of seconds that a cancelled caller waits for its write. On a broken disk, a write
# may never end.
_PATIENCE_S = 5.0


class NotSyncedError(OSError):
    """The new content is in place, but a power failure may bring back the old content."""


class StateFile:
    """A state file that is written by one task at a time, in the order of the calls."""

    def __init__(self, path: Path) -> None:
        self._path = path
        drop_partial(_beside(path))
        self._turn = asyncio.Lock()

    async def keep(self, content: bytes) -> None:
        """Write the content; on an OSError other than NotSyncedError, the old content stays.

        A cancelled call still waits up to `_PATIENCE_S` for the end of its write. Otherwise a
        later write could overtake the unfinished write.
        """
        async with self._turn:
            await uncut(asyncio.to_thread(keep_file, self._path, content), _PATIENCE_S)


def keep_file(file: Path, content: bytes) -> None:
    """Write a file that only its owner can read.

    On an OSError other than NotSyncedError, the old content stays.
    """
    # The folder may not exist yet: the stream store creates this folder, unless streams are
    # stored elsewhere.
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
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
    try:
        sync_folder(file.parent)
    except OSError as error:
        raise NotSyncedError(error.errno, error.strerror) from error


def _beside(file: Path) -> Path:
    return file.with_suffix(".new")
