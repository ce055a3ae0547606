"""Starts Debian's redis-server for a test. Tests with Redis are skipped if it is missing."""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tools.harness.eventually import eventually

needs_redis = pytest.mark.skipif(
    shutil.which("redis-server") is None and not os.environ.get("NEEDS_REDIS"),
    reason="redis-server is not installed; make test-gateways installs it",
)


class RedisServer:
    """One server. A restarted server has the same data, socket and port."""

    def __init__(self, folder: Path, *flags: str, port: int = 0) -> None:
        self._folder = folder
        self._flags = flags
        self._port = port
        # The path of a Unix socket must be short.
        self._sockets = tempfile.TemporaryDirectory(prefix="redis-")
        self.socket = Path(self._sockets.name) / "s"
        self.process: subprocess.Popen[bytes]
        self.start()

    @property
    def url(self) -> str:
        if self._port:
            return f"redis://127.0.0.1:{self._port}/0"
        return f"unix://{self.socket}"

    @property
    def client(self) -> redis.Redis:
        return redis.Redis(unix_socket_path=str(self.socket))

    def start(self) -> None:
        self._folder.mkdir(exist_ok=True, parents=True)
        where = ("--unixsocket", str(self.socket), "--dir", str(self._folder))
        ports = ("--port", str(self._port), "--bind", "127.0.0.1")
        command = ("redis-server", *ports, *where, "--save", "", *self._flags)
        with open(self._folder / "log", "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        eventually(self._answers)

    def _answers(self) -> bool:
        assert self.process.poll() is None, (self._folder / "log").read_text()
        with contextlib.suppress(redis.RedisError), self.client as client:
            return bool(client.ping())
        return False

    def end(self, number: signal.Signals = signal.SIGTERM) -> None:
        if self.process.poll() is None:
            self.process.send_signal(number)
        self.process.wait()

    def close(self) -> None:
        self.end(signal.SIGKILL)
        self._sockets.cleanup()


DURABLE = ("--appendonly", "yes", "--appendfsync", "always")


@contextlib.contextmanager
def redis_server(folder: Path, *flags: str, port: int = 0) -> Iterator[RedisServer]:
    server = RedisServer(folder, *flags, port=port)
    try:
        yield server
    finally:
        server.close()
