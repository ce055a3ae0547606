"""Locks the state directory, so that only one server uses the directory at a time.

The server's files in the directory are readable only by the server's user.
"""

import contextlib
import fcntl
import os
from pathlib import Path

from headrace_common.system.state_files import StateError as StateError
from headrace_common.system.state_files import make_way, sync_folder


class StateInUse(StateError):
    """Raised when another server uses the state directory."""

    code = "state_in_use"


class StateDir:
    """A locked directory. The lock belongs to the process and is released when the process ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._lock = _lock(path)
        except BlockingIOError as error:
            raise StateInUse(
                f"Another server uses the state directory {path}; stop the other server, or give "
                "this server a separate directory with --state-dir."
            ) from error
        except OSError as error:
            raise StateError(
                f"The state directory {path} cannot be used: {error.strerror}. Choose another "
                "directory with --state-dir, or keep streams in memory with --state-dir none."
            ) from error

    def private_file(self, name: str) -> Path:
        """Return the path of a file that only the server's user can read.

        The file is created if it does not exist.
        """
        path = self.path / name
        make_way(path)
        try:
            os.close(_open_private(path))
        except OSError as error:
            raise StateError(
                f"The file {name} in the state directory {self.path} cannot be used: "
                f"{error.strerror}. Remove the file, or choose another directory with --state-dir."
            ) from error
        return path

    def close(self) -> None:
        os.close(self._lock)


def _lock(directory: Path) -> int:
    missing = [path for path in (directory, *directory.parents) if not path.exists()]
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    for made in missing:
        sync_folder(made.parent)
    lock = directory / "lock"
    if lock.exists() or not any(directory.iterdir()):
        # A directory that contains other files keeps its mode.
        directory.chmod(0o700)
    make_way(lock)
    with contextlib.ExitStack() as opened:
        descriptor = _open_private(lock)
        opened.callback(os.close, descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        opened.pop_all()
        return descriptor


def _open_private(path: Path) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    os.fchmod(descriptor, 0o600)
    return descriptor
