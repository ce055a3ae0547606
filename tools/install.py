"""Installs this checkout and its pinned packages into .venv: `python3 tools/install.py [.[EXTRA]]`.

Reports what pip does: on a terminal in one line that changes, elsewhere in one line per stage and
another line every 30 seconds.
This file uses the standard library alone, because nothing may be installed yet.
"""

import http.client
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
PIP = [str(VENV / "bin" / "python"), "-m", "pip"]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
_POLL_S = 0.2
# If stderr is not a terminal, progress is shown again after this many seconds.
_AGAIN_S = 30.0
# The name of a package that pip needs, or the name and the size of a package's file.
_FOUND = re.compile(
    r"(?:Collecting|Requirement already satisfied:) ([\w.-]+)|Processing \S*/([^/-]+)-"
)
_FILE = re.compile(r"\s+(?:Downloading|Using cached) (?:\S*/)?([^/-]+)-\S*(?<!\.metadata) \((.+)\)")
# Only the name of a file that is at least a megabyte large explains a wait.
_LARGE = re.compile(r"[\d.]+ [MG]B")


class Progress:
    """The stage of an installation, from the lines that pip prints."""

    def __init__(self) -> None:
        self.stage = "preparing the installation"
        self.detail = ""
        self.num_packages = 0  # 0 until pip starts to unpack
        self._found: set[str] = set()
        self._num_unpacked = 0

    def read(self, line: str) -> None:
        """Learn from one line of pip's output."""
        if found := _FOUND.match(line):
            self._found.add((found[1] or found[2]).lower().replace("_", "-"))
            self.stage, self.detail = "resolving packages", f", {len(self._found)} found"
        elif found := _FILE.match(line):
            is_large = _LARGE.fullmatch(found[2]) is not None
            self.stage = "downloading packages"
            self.detail = f": {found[1]}, {found[2]}" if is_large else ""
        elif line.startswith("Installing collected packages: "):
            self.stage, self.num_packages = "unpacking packages", line.count(",") + 1

    def describe(self, num_unpacked: int) -> str:
        """Describe the stage in one line. The number of unpacked packages never falls."""
        if self.num_packages:
            # While pip replaces a package, its folder is missing for a short time.
            self._num_unpacked = max(self._num_unpacked, min(num_unpacked, self.num_packages))
            return f"{self.stage}, {self._num_unpacked} of {self.num_packages}"
        return self.stage + self.detail


class Screen:
    """Writes to stderr. On a terminal, each line of progress replaces the line before."""

    def __init__(self) -> None:
        self._moves = sys.stderr.isatty()
        self._stages: set[str] = set()
        self._start = self._shown_at = time.monotonic()

    def show(self, stage: str, description: str) -> None:
        """Show progress; without a terminal, only each new stage and every `_AGAIN_S` seconds."""
        now = time.monotonic()
        line = f"headrace: {description} ({now - self._start:.0f} s)"
        if self._moves:
            width = os.get_terminal_size(sys.stderr.fileno()).columns or 80
            sys.stderr.write("\r\x1b[K" + line[: width - 1])
            sys.stderr.flush()
        elif stage not in self._stages or now > self._shown_at + _AGAIN_S:
            self.keep(line)
            self._shown_at = now
        self._stages.add(stage)

    def keep(self, line: str) -> None:
        """Show a line that stays, such as a warning of pip."""
        self.clear()
        sys.stderr.write(line.rstrip("\n") + "\n")
        sys.stderr.flush()

    def clear(self) -> None:
        """Remove the line of progress from a terminal."""
        if self._moves:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def pip_command(packages: str, configured: str) -> list[str]:
    """Return the command that installs `packages`: "." or ".[EXTRA,EXTRA]".

    configured: the output of `pip config list`.

    pip would compile 11,000 modules to byte code, which takes longer than unpacking them. Python
    compiles and stores those that a server imports, unless PYTHONDONTWRITEBYTECODE is set.
    """
    command = [*PIP, "install", "--progress-bar", "off", "--disable-pip-version-check"]
    command += [*index_options(configured), "-c", "constraints.txt", "-e", packages]
    return command if sys.dont_write_bytecode else [*command, "--no-compile"]


def index_options(configured: str, index: str = CPU_INDEX) -> list[str]:
    """Return options for PyTorch's build for CPUs, which is much smaller than that with CUDA.

    The result is empty on a machine with an NVIDIA driver, and if `pip config list` names an index.
    """
    is_own = "index" in configured or "find-links" in configured
    if sys.platform != "linux" or is_own or shutil.which("nvidia-smi") is not None:
        return []
    # For every package, pip tries several times to reach an index that does not answer.
    try:
        urllib.request.urlopen(f"{index}/torch/", timeout=10).close()
    except (OSError, http.client.HTTPException):
        return []
    return ["--extra-index-url", index]


def run(command: list[str], screen: Screen) -> int:
    """Run pip, show its progress and its errors, and return its exit code.

    Warnings are shown only if pip fails: there may be one for each package.
    """
    pipe = subprocess.PIPE
    pip = subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True)
    assert pip.stdout and pip.stderr
    progress = Progress()
    warnings: list[str] = []

    def keep(line: str) -> None:
        warnings.append(line) if line.startswith("WARNING: ") else screen.keep(line)

    readers = [
        threading.Thread(target=_each, args=(pip.stdout, progress.read)),
        threading.Thread(target=_each, args=(pip.stderr, keep)),
    ]
    for reader in readers:
        reader.start()
    num_before = _num_installed()
    while pip.poll() is None:
        screen.show(progress.stage, progress.describe(_num_installed() - num_before))
        time.sleep(_POLL_S)
    for reader in readers:
        reader.join()
    screen.clear()
    if pip.returncode:
        _each(warnings, screen.keep)
    return pip.returncode


def _each(lines: Iterable[str], take: Callable[[str], None]) -> None:
    for line in lines:
        take(line)


def _num_installed() -> int:
    return sum(1 for _ in VENV.glob("lib/python*/site-packages/*.dist-info"))


def main() -> int:
    screen = Screen()
    try:
        if not (VENV / "bin" / "pip").exists():
            screen.show("creating .venv", "creating .venv")
            if code := subprocess.call([sys.executable, "-m", "venv", str(VENV)]):
                return code
        listed = subprocess.run([*PIP, "config", "list"], stdout=subprocess.PIPE, text=True)
        packages = sys.argv[1] if len(sys.argv) > 1 else "."
        return run(pip_command(packages, listed.stdout), screen)
    except KeyboardInterrupt:
        screen.clear()
        return 130


if __name__ == "__main__":
    sys.exit(main())
