"""A real `headrace serve` with headrace-mini; restarts keep its port and its store."""

import json
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PYTHON = os.environ.get("HEADRACE_PYTHON", str(ROOT / ".venv/bin/python"))
LOAD_TIMEOUT_S = 180


def free_port() -> int:
    """From WEB_TEST_PORT on, where that is given."""
    if "WEB_TEST_PORT" in os.environ:
        os.environ["WEB_TEST_PORT"] = str(port := int(os.environ["WEB_TEST_PORT"]) + 1)
        return port
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Server:
    def __init__(self, *flags: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.flags = flags
        self.key = ""
        self._state = tempfile.mkdtemp(prefix="headrace-web-")
        self._log = Path(self._state, "log")
        self.start()

    def start(self) -> None:
        command = [PYTHON, "-m", "headrace", "serve", "--port", str(self.port), "--threads", "1"]
        command += ["--state-dir", f"{self._state}/store", *self.flags]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        with self._log.open("a") as log:
            self._process = subprocess.Popen(command, stderr=log, env=environment)
        deadline = time.monotonic() + LOAD_TIMEOUT_S
        while not self._is_ready():
            is_up = self._process.poll() is None and time.monotonic() < deadline
            assert is_up, self._log.read_text()
            time.sleep(0.1)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def get(self, path: str) -> Any:
        asked = urllib.request.Request(self.url + path)
        if self.key:
            asked.add_header("Authorization", f"Bearer {self.key}")
        with urllib.request.urlopen(asked, timeout=10) as answer:
            return json.load(answer)

    def kill_engine(self) -> None:
        pid = self.get("/manage/state")["engine"]["pid"]
        if pid:
            os.kill(pid, signal.SIGKILL)

    def restart(self) -> None:
        self._process.kill()
        self._process.wait()
        self.start()

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
