"""Runs Debian's HAProxy in front of two gateways, with the configuration that the docs show."""

import contextlib
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx

from tools.harness.eventually import eventually
from tools.harness.processes import free_port

CONFIG = Path(__file__).parents[2] / "deploy" / "haproxy.cfg"


def configuration(address: str, gateways: Sequence[str], key: str | None = None) -> str:
    """Return `deploy/haproxy.cfg`, with these addresses in place of the example addresses.

    If `key` is given, the balancer adds this API key to requests that have none.
    """
    lines = CONFIG.read_text().replace("127.0.0.1:8080", address).splitlines()
    head = [line for line in lines if not line.startswith("    server ")]
    if key is not None:
        at = head.index("    default_backend gateways")
        adds = (
            f'set-header Authorization "Bearer {key}" unless {{ req.hdr(Authorization) -m found }}'
        )
        head.insert(at, f"    http-request {adds}")
    servers = [f"    server gateway{i} {gateway}" for i, gateway in enumerate(gateways)]
    return "\n".join([*head, *servers]) + "\n"


class Balancer:
    """HAProxy in front of the gateways at these addresses, which need not run yet."""

    def __init__(
        self,
        address: str,
        gateways: Sequence[str],
        folder: Path,
        prefix: tuple[str, ...] = (),
        key: str | None = None,
    ) -> None:
        self.url = f"http://{address}"
        path = folder / "haproxy.cfg"
        path.write_text(configuration(address, gateways, key))
        self._process = subprocess.Popen(
            [*prefix, "haproxy", "-db", "-q", "-f", str(path)], stderr=subprocess.DEVNULL
        )

    @classmethod
    def local(cls, ports: tuple[int, int], folder: Path) -> "Balancer":
        """Start a balancer for gateways on this machine."""
        gateways = [f"127.0.0.1:{port}" for port in ports]
        return cls(f"127.0.0.1:{free_port()}", gateways, folder)

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@contextlib.contextmanager
def balanced(ports: tuple[int, int], folder: Path) -> Iterator[str]:
    """Yields the balancer's URL as soon as a gateway answers through the balancer."""
    balancer = Balancer.local(ports, folder)
    try:
        eventually(lambda: answers(f"{balancer.url}/health"))
        yield balancer.url
    finally:
        balancer.close()


def answers(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url).status_code == 200
    return False
