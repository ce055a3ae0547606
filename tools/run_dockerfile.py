"""Runs the steps of a Dockerfile in a Debian system, and then starts what the image would start.

    unshare --mount python tools/run_dockerfile.py FILE FOLDER [ARG=VALUE ...]

The program needs root and debootstrap, but no containers. Debian's Python replaces the image
named by FROM; all other steps are executed as written, in a chroot. pip has the same settings
as on this machine.
"""

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

KEY = "secret"
START_S = 300
PACKAGES = "python3,python3-venv,ca-certificates"
START = ("ENTRYPOINT", "HEALTHCHECK", "STOPSIGNAL", "VOLUME", "EXPOSE")
"""Instructions that say how the image is started."""


class Step(NamedTuple):
    """An instruction and the rest of its line."""

    name: str
    words: str


def read_steps(text: str) -> Iterator[Step]:
    lines = (line for line in text.splitlines() if line.strip() and not line.startswith("#"))
    whole = ""
    for line in lines:
        whole += line.removesuffix("\\")
        if not line.endswith("\\"):
            name, _, words = whole.strip().partition(" ")
            yield Step(name.upper(), words.strip())
            whole = ""


class Tree:
    """The image so far: its files, and the settings of its next step."""

    def __init__(self, folder: Path, given: dict[str, str]) -> None:
        self.root, self._base = folder / "root", folder / "base"
        self.environment = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin", "LANG": "C.UTF-8"}
        # The instructions in START and their arguments.
        self.settings: dict[str, str] = {}
        self._given = given
        self._arguments: dict[str, str] = {}
        self._user, self._workdir = "root", "/"

    def do(self, step: Step) -> None:
        done = {"FROM": self._from, "RUN": self._run, "COPY": self._copy, "ENV": self._env}
        done |= {"ARG": self._arg, "USER": self._set_user, "WORKDIR": self._set_workdir}
        if step.name in START:
            self.settings[step.name] = step.words
        else:
            done[step.name](step.words)

    def command(self, words: list[str], **more: str) -> list[str]:
        """Return the command that executes `words` as the image's user, in its folder."""
        variables = [f"{k}={v}" for k, v in (self.environment | more).items()]
        chroot = ["chroot", f"--userspec={self._user}", str(self.root)]
        return [*chroot, "env", "-i", f"--chdir={self._workdir}", *variables, *words]

    def _from(self, words: str) -> None:
        if not (self._base / "ready").exists():
            shutil.rmtree(self._base, ignore_errors=True)
            include = f"--include={PACKAGES}"
            call("debootstrap", "--variant=minbase", include, "bookworm", str(self._base))
            (self._base / "ready").touch()
        shutil.rmtree(self.root, ignore_errors=True)
        call("cp", "--archive", "--reflink=auto", str(self._base), str(self.root))
        for name in ("proc", "dev", "dev/shm"):
            call("mount", "--bind", f"/{name}", str(self.root / name))
        for path in pip_paths():
            place = self.root / path.relative_to("/")
            if path.is_dir():
                place.mkdir(parents=True, exist_ok=True)
            else:
                place.parent.mkdir(parents=True, exist_ok=True)
                place.touch()
            call("mount", "--bind", str(path), str(place))
        shutil.copy("/etc/resolv.conf", self.root / "etc/resolv.conf")
        # Like Python's images, the tree has a separate prefix that contains `python` and `pip`.
        call(*self.command(["python3", "-m", "venv", "/usr/local"]))

    def _run(self, words: str) -> None:
        pip = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        call(*self.command(["sh", "-c", words], **self._arguments, **pip))

    def _copy(self, words: str) -> None:
        *sources, place = shlex.split(words)
        target = self.root / self._workdir.lstrip("/") / place
        for source in map(Path, sources):
            if source.is_dir():
                ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
                shutil.copytree(source, target, ignore=ignored, dirs_exist_ok=True)
            else:
                shutil.copy(source, target)

    def _env(self, words: str) -> None:
        self.environment |= dict(pair.split("=", 1) for pair in shlex.split(words))

    def _arg(self, words: str) -> None:
        name, _, default = words.partition("=")
        self._arguments[name] = self._given.get(name, default)

    def _set_user(self, words: str) -> None:
        self._user = words

    def _set_workdir(self, words: str) -> None:
        self._workdir = words
        (self.root / words.lstrip("/")).mkdir(parents=True, exist_ok=True)


def pip_paths() -> list[Path]:
    """Return the files and folders that pip's settings name, and the files with these settings."""
    told = subprocess.run(
        [sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True
    )
    words = told.stdout.replace("=", " ").replace("'", " ").split()
    words += ["/etc/pip.conf", "/etc/xdg/pip"]
    paths = {Path(word.removeprefix("file://")) for word in words}
    return sorted(path for path in paths if path.is_absolute() and path.exists())


def call(*command: str) -> None:
    subprocess.run(command, check=True)


def serve(tree: Tree) -> None:
    """Starts the image's server, waits until it is healthy, sends one request and stops it."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    more = {"HEADRACE_PORT": port, "HEADRACE_API_KEYS": KEY}
    entry = json.loads(tree.settings["ENTRYPOINT"])
    check = json.loads(tree.settings["HEALTHCHECK"].partition("CMD ")[2])
    began = time.monotonic()
    with subprocess.Popen(tree.command(entry, **more)) as server:
        try:
            wait(lambda: is_healthy(tree.command(check, **more)))
            print(f"healthy after {time.monotonic() - began:.0f} s: {asked(port)!r}", flush=True)
            server.send_signal(signal.Signals[tree.settings["STOPSIGNAL"]])
            if (code := server.wait(60)) != 0:
                raise SystemExit(f"It ended with exit code {code}.")
        finally:
            server.kill()


def is_healthy(check: list[str]) -> bool:
    return subprocess.run(check, stderr=subprocess.DEVNULL).returncode == 0


def wait(is_well: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_S
    while not is_well():
        if time.monotonic() > deadline:
            raise SystemExit(f"It was not healthy after {START_S} s.")
        time.sleep(1)


def asked(port: str) -> str:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Count from 1 to 5."}]}
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(body | {"temperature": 0}).encode(),
        {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        text = json.load(answer)["choices"][0]["message"]["content"]
    assert isinstance(text, str) and text
    return text


def main(file: str, folder: str, *pairs: str) -> None:
    tree = Tree(Path(folder).resolve(), dict(pair.split("=", 1) for pair in pairs))
    for number, step in enumerate(read_steps(Path(file).read_text()), 1):
        print(f"step {number}: {step.name} {step.words[:80]}", flush=True)
        tree.do(step)
    serve(tree)


if __name__ == "__main__":
    main(*sys.argv[1:])
