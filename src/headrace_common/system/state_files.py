"""Handles files that survive the server. The files are private to their user.

Unusable files are moved aside.
"""

import contextlib
import logging
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from headrace_common.errors import HeadraceError

logger = logging.getLogger(__name__)

T = TypeVar("T")

MARK = ".unreadable-"
"""Separates a file's old name from the time of the move."""
_MAX_NAME = 200  # characters of the old name


class StateError(HeadraceError):
    """The state directory cannot be used."""

    code = "state_unusable"


def move_aside(path: Path, why: str) -> None:
    """Rename an unusable file, so that the server can start and nothing is lost."""
    aside = path.with_name(f"{path.name[:_MAX_NAME]}{MARK}{time.time_ns()}")
    try:
        path.rename(aside)
    except OSError as error:
        raise StateError(
            f"{path} cannot be used ({why}), and cannot be moved aside ({error.strerror}); remove "
            "it, or choose another directory with --state-dir."
        ) from error
    logger.warning("%s cannot be used (%s); it was renamed to %s", path, why, aside.name)


def make_folder(path: Path) -> None:
    """Make sure that the folder exists and that only its user can open the folder."""
    if os.path.lexists(path) and not path.is_dir():
        move_aside(path, "it is not a folder")
    if not path.is_dir():
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Otherwise a power failure may take the new folder, and with it all files inside.
        sync_folder(path.parent)
    path.chmod(0o700)


def make_way(path: Path) -> None:
    """Move aside a folder, pipe, device or broken link with the name of a wanted file.

    Opening or reading a pipe or device may never end.
    """
    if os.path.lexists(path) and not path.is_file():
        move_aside(path, "it is not a file")


def read_kept(path: Path, decode: Callable[[bytes], T], max_bytes: int) -> T | None:
    """Return the decoded content of a file.

    Returns None if the file does not exist. Also returns None for an unusable file, which is moved
    aside.
    """
    make_way(path)
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
        if len(content) <= max_bytes:
            return decode(content)
        why = f"it has more than {max_bytes} bytes"
    except FileNotFoundError:
        return None
    except OSError as error:
        why = error.strerror or "it cannot be read"
    except (ValueError, HeadraceError, RecursionError) as error:
        why = f"it is damaged: {str(error)[:200]}"
    move_aside(path, why)
    return None


def drop_partial(path: Path) -> None:
    """Remove the partial file of an interrupted write. A folder of this name is moved aside."""
    with contextlib.suppress(OSError):
        if stat.S_ISDIR(path.lstat().st_mode):
            move_aside(path, "it is not a file")
        else:
            path.unlink()


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that a created or replaced file in the folder survives a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
