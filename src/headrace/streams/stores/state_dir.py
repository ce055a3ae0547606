"""The directory that streams live in: private to its user, and to one server at a time."""

import contextlib
import fcntl
import os
from pathlib import Path

from headrace_common.system.state_files import StateError as StateError
from headrace_common.system.state_files import make_way


class StateInUse(StateError):
    """Another server has the state directory."""

    code = "state_in_use"


class StateDir:
    """A locked directory. The lock belongs to the process, and is gone when that ends."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._lock = _lock(path)
        except BlockingIOError as error:
            raise StateInUse(
                f"Another server uses the state directory {path}; stop it, or give this one a "
                "directory of its own with --state-dir."
            ) from error
        except OSError as error:
            raise StateError(
                f"The state directory {path} cannot be used: {error.strerror}. Choose another with "
                "--state-dir, or keep streams in memory with --state-dir none."
            ) from error

    def private_file(self, name: str) -> Path:
        """A file that only its user can read; created if it does not exist."""
        path = self.path / name
        make_way(path)
        try:
            os.close(_open_private(path))
        except OSError as error:
            raise StateError(
                f"The state directory cannot be used: {name}: {error.strerror}. Remove it, or "
                "choose another directory with --state-dir."
            ) from error
        return path

    def close(self) -> None:
        os.close(self._lock)


def _lock(directory: Path) -> int:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = directory / "lock"
    if lock.exists() or not any(directory.iterdir()):
        directory.chmod(0o700)  # a directory that holds other things keeps its mode
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
