"""Fixtures with the installed wheel and a user who may not write to it."""

import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.harness.servers import ServerProcess

ROOT = Path(__file__).parents[2]
ENVIRONMENT = ROOT / "build/package-venv"
_NOBODY = "65534"
_OURS = ("PYTHONPATH", "VIRTUAL_ENV", "XDG_CACHE_HOME", "XDG_STATE_HOME", "NUMBA_CACHE_DIR")


class OtherUser:
    """A user with a home and a working folder who may not write anywhere else.

    Root becomes `nobody`, with the right to read all files, since this checkout may be in a private
    home. Other users stay the same.
    """

    def __init__(self, home: Path) -> None:
        self.folder = home / "work"
        self.folder.mkdir()
        become: tuple[str, ...] = ()
        if os.getuid() == 0:
            for path in (home, self.folder):
                shutil.chown(path, int(_NOBODY), int(_NOBODY))
            may_read = ("--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search")
            ids = (f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups")
            become = ("setpriv", *ids, *may_read)
        unset = (f"--unset={name}" for name in _OURS)
        self._become = (*become, "env", *unset, f"--chdir={self.folder}", f"HOME={home}")

    def run(self, program: str, *words: str, said: str = "") -> str:
        """Run a program of the environment with `said` on its stdin, and return its stdout."""
        done = subprocess.run(
            [*self._become, str(ENVIRONMENT / "bin" / program), *words],
            input=said,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def serve(self, *flags: str) -> ServerProcess:
        return ServerProcess(*flags, program=(*self._become, str(ENVIRONMENT / "bin/headrace")))


@pytest.fixture(scope="session")
def read_only() -> Iterator[None]:
    """Make the environment read-only, and restore its permissions afterwards."""
    paths = [path for path in (ENVIRONMENT, *ENVIRONMENT.rglob("*")) if not path.is_symlink()]
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in paths}
    for path, mode in modes.items():
        path.chmod(mode & ~0o222)
    yield
    for path, mode in modes.items():
        path.chmod(mode)


@pytest.fixture(scope="session")
def user(read_only: None) -> Iterator[OtherUser]:
    home = Path(tempfile.mkdtemp(prefix="headrace-package-"))
    yield OtherUser(home)
    shutil.rmtree(home)


@pytest.fixture(scope="session")
def server(user: OtherUser) -> Iterator[ServerProcess]:
    running = user.serve()
    yield running.wait_until_ready()
    running.stop()
