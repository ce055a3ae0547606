"""Files and folders that outlive a server: private to their user, moved aside when unusable."""

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
"""Separates a file's old name from the time at which it was moved aside."""
_MAX_NAME = 200  # characters of that name


class StateError(HeadraceError):
    """The state directory cannot be used."""

    code = "state_unusable"


def move_aside(path: Path, why: str) -> None:
    """Rename what cannot be used, so that the server starts and nothing is lost."""
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
    """Make sure that the folder exists and only its user can open it."""
    if os.path.lexists(path) and not path.is_dir():
        move_aside(path, "it is not a folder")
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.chmod(0o700)


def make_way(path: Path) -> None:
    """Move aside a folder, pipe, device or broken link that has the name of a wanted file.

    Opening or reading one of them may never end.
    """
    if os.path.lexists(path) and not path.is_file():
        move_aside(path, "it is not a file")


def read_kept(path: Path, decode: Callable[[bytes], T], max_bytes: int) -> T | None:
    """The decoded content; None if there is no such file, or after it was moved aside."""
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
    """Remove what an interrupted write left."""
    with contextlib.suppress(OSError):
        if not stat.S_ISDIR(path.lstat().st_mode):
            path.unlink()
