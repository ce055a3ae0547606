"""Shows on a cluster of machines that a stream survives the loss of its gateway's network.

Three gateways, HAProxy, Redis with a replica and a client run on machines of their own, which are
network namespaces. `make cluster-demo` needs root and takes about two minutes.
"""

import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from stress.cluster.following import StreamReader, question
from stress.cluster.machines import GatewayNode, Machines
from stress.cluster.network import Network, can_make_networks
from tools.harness.eventually import eventually

MODEL = "headrace-mini"
FLAGS = ("--threads", "1", "--dtype", "float32", "--heartbeat-s", "1", "--drain-s", "0")
QUESTION = question("Count from 1 to 300.", 1200)
_ROUTE = "/v1/chat/completions"


@contextlib.contextmanager
def machines(
    folder: Path, model: Path | str = MODEL, flags: tuple[str, ...] = FLAGS
) -> Iterator[Machines]:
    """Yields a running cluster; this thread is then on the clients' machine."""
    with Network() as network:
        cluster = Machines(network, folder, model, flags)
        cluster.start_services()
        for gateway in cluster.gateways:
            gateway.start()
        with cluster.clients.entered():
            for gateway in cluster.gateways:
                eventually(gateway.is_healthy, 300)
            eventually(lambda: _is_healthy(cluster.url))
            yield cluster


def undisturbed(cluster: Machines) -> str:
    """Return the text of the answer that no fault disturbs."""
    answer = httpx.post(f"{cluster.url}{_ROUTE}", json=QUESTION, timeout=300)
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def _is_healthy(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(f"{url}/health").status_code == 200
    return False


def stream_through_a_cut(cluster: Machines, reader: StreamReader) -> tuple[str, str]:
    """Read a stream, and cut its gateway off from Redis in the middle.

    Returns the names of the gateways that wrote the stream before and after the cut.
    """
    before: GatewayNode | None = None
    after: GatewayNode | None = None
    for text in reader.read(QUESTION):
        if before is None and len(text) > 100:
            before = cluster.writer_of(reader.stream_id)
            assert before is not None
            for store in (cluster.primary, cluster.replica):
                cluster.network.part(before.machine, store.machine)
            cluster.network.drop(before.machine, cluster.redis_address)
            _say(f"{len(text)} characters came from {before.machine.name}.")
            _say(f"{before.machine.name} is cut off from Redis.")
        elif reader.num_breaks and after is None:
            after = cluster.writer_of(reader.stream_id)
    assert before is not None and after is not None
    return before.machine.name, after.machine.name


def _say(text: str) -> None:
    print(f"{time.strftime('%X')} {text}", flush=True)


def main() -> int:
    if not can_make_networks():
        print("The demo needs root, iproute2 and network namespaces.")
        return 1
    with tempfile.TemporaryDirectory(prefix="headrace-machines-") as folder:
        _say("The machines start.")
        with machines(Path(folder)) as cluster:
            names = ", ".join(machine.name for machine in cluster.network.machines.values())
            _say(f"They run: {names}. Clients use {cluster.url}.")
            text = undisturbed(cluster)
            reader = StreamReader(
                cluster.url, "demo", lambda why: _say(f"The client's connection broke: {why}.")
            )
            before, after = stream_through_a_cut(cluster, reader)
            _say(f"The stream began at {before} and ended at {after}.")
            _say(f"The longest silence was {reader.longest_silence_s:.1f} s.")
            is_same = reader.text == text
            _say(f"All {len(text)} characters are as without a fault: {is_same}.")
            return 0 if is_same and before != after else 1


if __name__ == "__main__":
    sys.exit(main())
