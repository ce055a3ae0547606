"""Tests of gateways, HAProxy and Redis on separate machines with network and process failures."""

import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from stress.cluster.demo import QUESTION, machines, stream_through_a_cut, undisturbed
from stress.cluster.following import StreamReader
from stress.cluster.machines import GatewayNode, Machines
from stress.cluster.network import can_make_networks
from tools.harness.eventually import eventually
from tools.harness.redis_servers import needs_redis

pytestmark = [
    needs_redis,
    pytest.mark.skipif(not can_make_networks(), reason="needs root and network namespaces"),
]
NUM_READERS = 4


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    with machines(tmp_path_factory.mktemp("machines")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def text(running: Machines) -> str:
    return undisturbed(running)


@pytest.fixture
def cluster(running: Machines) -> Iterator[Machines]:
    """Yield the cluster, and restore its network and gateways after the test."""
    yield running
    running.network.heal()
    for gateway in running.gateways:
        eventually(gateway.is_healthy, 300)


def read_through(
    cluster: Machines, name: str, disturb: Callable[[GatewayNode], None]
) -> StreamReader:
    """Read a stream to its end; call `disturb` once with the gateway that writes it."""
    reader = StreamReader(cluster.url, name)
    is_disturbed = False
    for so_far in reader.read(QUESTION):
        if not is_disturbed and len(so_far) > 100:
            writer = cluster.writer_of(reader.stream_id)
            assert writer is not None
            disturb(writer)
            is_disturbed = True
    print(f"{name}: silent for {reader.longest_silence_s:.1f} s, {reader.num_breaks} breaks")
    return reader


def test_a_stream_survives_if_its_gateway_loses_the_connection_to_redis(
    cluster: Machines, text: str
) -> None:
    reader = StreamReader(cluster.url, "cut off from Redis")
    before, after = stream_through_a_cut(cluster, reader)
    assert before != after and reader.text == text
    assert reader.longest_silence_s < 25


def test_a_stream_survives_a_gateway_that_vanishes_from_the_network(
    cluster: Machines, text: str
) -> None:
    reader = read_through(cluster, "unplugged", lambda it: cluster.network.cut(it.machine))
    assert reader.text == text
    # The balancer closes the connections, so the client needs no timeout.
    assert reader.longest_silence_s < 25


def test_a_stream_survives_a_failover_of_redis(cluster: Machines, text: str) -> None:
    def fail_over(writer: GatewayNode) -> None:
        old = cluster.primary
        old.kill()
        cluster.fail_over()
        old.start(cluster.primary)

    reader = read_through(cluster, "failover", fail_over)
    assert reader.text == text
    eventually(cluster.replica.is_in_sync)


def test_a_rolling_upgrade_under_load_loses_no_stream(cluster: Machines, text: str) -> None:
    """Restart each gateway in turn while clients read streams."""
    is_over = threading.Event()
    readers: list[StreamReader] = []
    breaks: list[str] = []

    def read_again_and_again(number: int) -> None:
        while not is_over.is_set():
            name = f"upgrade {number} {len(readers)}"
            reader = StreamReader(cluster.url, name, breaks.append)
            readers.append(reader)
            for _ in reader.read(QUESTION, within_s=300):
                pass

    threads = [
        threading.Thread(target=read_again_and_again, args=(number,))
        for number in range(NUM_READERS)
    ]
    for thread in threads:
        thread.start()
    try:
        for gateway in cluster.gateways:
            time.sleep(2.0)
            gateway.end(signal.SIGTERM)
            gateway.start()
            eventually(gateway.is_healthy, 300)
    finally:
        is_over.set()
        for thread in threads:
            thread.join(300)
    silences = [reader.longest_silence_s for reader in readers]
    print(f"{len(readers)} streams, {len(breaks)} breaks, silent for {max(silences):.1f} s at most")
    assert {reader.text for reader in readers} == {text}
    assert len(breaks) >= len(cluster.gateways)
    assert not [why for why in breaks if why.startswith("status 4") or why == "status 500"]
