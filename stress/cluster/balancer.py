"""Runs Debian's HAProxy in front of two gateways, with the configuration that the docs show."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx

from tools.harness.eventually import eventually
from tools.harness.processes import free_port

CONFIG = Path(__file__).parents[2] / "deploy" / "haproxy.cfg"


class Balancer:
    """HAProxy in front of the gateways on `ports`, which need not run yet."""

    def __init__(self, ports: tuple[int, int], folder: Path) -> None:
        self.port = free_port()
        text = CONFIG.read_text()
        for example, port in zip((8080, 8001, 8002), (self.port, *ports), strict=True):
            text = text.replace(f"127.0.0.1:{example}", f"127.0.0.1:{port}")
        path = folder / "haproxy.cfg"
        path.write_text(text)
        self._process = subprocess.Popen(
            ["haproxy", "-db", "-q", "-f", str(path)], stderr=subprocess.DEVNULL
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def balanced(ports: tuple[int, int], folder: Path) -> Iterator[str]:
    """Yields the balancer's URL as soon as a gateway answers through the balancer."""
    balancer = Balancer(ports, folder)
    try:
        eventually(lambda: answers(f"{balancer.url}/health"))
        yield balancer.url
    finally:
        balancer.close()


def answers(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url).status_code == 200
    return False
