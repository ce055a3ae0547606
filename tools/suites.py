"""Run a suite of tests, a stress run or a benchmark: `tools/suites.py NAME` or `make NAME`.

Without a name, the program lists all suites. tools/suites.toml is the table. Each suite there
has a `command`, the environments that it `needs`, and `defaults` for variables that the caller
may set, such as KILLS or SEED. An environment has a `command` that installs it. If the
environment has the key `ready`, the command runs only if the file `ready` is missing or older
than one of the `inputs` (paths in git). Without the key, the command runs every time.

This file uses the standard library alone, because nothing may be installed yet.
"""

import fcntl
import os
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = tomllib.loads((ROOT / "tools" / "suites.toml").read_text())
SUITES, ENVIRONMENTS = TABLE["suites"], TABLE["environments"]


def install(name: str) -> float:
    """Install the environment `name` and the environments that it needs, unless they are current.

    Returns the time at which the file `ready` was written, in seconds since the epoch.
    """
    environment = ENVIRONMENTS[name]
    newest = max(map(install, environment.get("needs", [])), default=0.0)
    if "ready" not in environment:
        shell(environment["command"])
        return newest
    ready = ROOT / environment["ready"]
    (ROOT / "build").mkdir(exist_ok=True)
    with (ROOT / "build" / f"{name}.lock").open("w") as lock:
        # Another suite may install the same environment now.
        fcntl.flock(lock, fcntl.LOCK_EX)
        for path in tracked(environment.get("inputs", [])):
            newest = max(newest, path.stat().st_mtime)
        if not ready.exists() or ready.stat().st_mtime < newest:
            shell(environment["command"])
            ready.touch()
    return ready.stat().st_mtime


def tracked(paths: list[str]) -> list[Path]:
    """Return the existing files at or below `paths` that git tracks."""
    if not paths:
        return []
    listing = ["git", "ls-files", "--", *paths]
    listed = subprocess.run(listing, cwd=ROOT, check=True, capture_output=True, text=True)
    return [ROOT / name for name in listed.stdout.splitlines() if (ROOT / name).exists()]


def shell(command: str, defaults: dict[str, str] | None = None) -> None:
    """Run `command` in bash, and exit with its code if it fails."""
    variables = {"SEED": "0", "PYTHON": "python3"} | (defaults or {}) | os.environ
    # Paste the values of ARGS and SECONDS into the command. ARGS may contain quotes for the shell,
    # and bash has its own variable SECONDS.
    for name in ("ARGS", "SECONDS"):
        command = command.replace(f"${name}", variables.get(name, ""))
    bash = ["bash", "-o", "pipefail", "-c", TABLE["prelude"] + command]
    ended = subprocess.run(bash, cwd=ROOT, env=variables)
    if ended.returncode:
        sys.exit(ended.returncode)


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1] not in SUITES:
        print("usage: python3 tools/suites.py NAME, or make NAME\n")
        for name, suite in SUITES.items():
            print(f"  {name:20} {suite['about']}")
        sys.exit(0 if len(sys.argv) == 1 else 2)
    suite = SUITES[sys.argv[1]]
    with ThreadPoolExecutor(2) as installers:
        list(installers.map(install, suite.get("needs", ["test"])))
    shell(suite["command"], suite.get("defaults"))


if __name__ == "__main__":
    main()
