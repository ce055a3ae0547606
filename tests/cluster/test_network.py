"""Tests of the simulated machines, which run in network namespaces."""

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from stress.cluster.network import Machine, Network, NetworkError, can_make_networks, remove
from tools.harness.eventually import eventually

pytestmark = pytest.mark.skipif(
    not can_make_networks(), reason="needs root, the commands ip and tc, and network namespaces"
)
PORT = 7000
ECHO = f"""
import socketserver
class Echo(socketserver.StreamRequestHandler):
    def handle(self):
        for line in self.rfile:
            self.wfile.write(line)
socketserver.ThreadingTCPServer.allow_reuse_address = True
socketserver.ThreadingTCPServer(("0.0.0.0", {PORT}), Echo).serve_forever()
"""


@pytest.fixture
def network() -> Iterator[Network]:
    with Network() as network:
        yield network


def echoing(machine: Machine) -> "subprocess.Popen[bytes]":
    process = machine.start(sys.executable, "-c", ECHO)
    eventually(lambda: answers(machine, machine.address))
    return process


def answers(source: Machine, address: str, within_s: float = 0.5) -> bool:
    with source.entered():
        try:
            line = socket.create_connection((address, PORT), timeout=within_s)
        except OSError:
            return False
    with line:
        return exchanges(line, within_s)


def exchanges(line: socket.socket, within_s: float = 0.5) -> bool:
    line.settimeout(within_s)
    with contextlib.suppress(OSError):
        line.sendall(b"hello\n")
        return line.recv(100).endswith(b"hello\n")
    return False


def test_machines_reach_each_other_by_their_addresses(network: Network) -> None:
    one, two = network.add("one"), network.add("two")
    echoing(two)
    assert one.address != two.address
    assert answers(one, two.address)
    assert not answers(one, "127.0.0.1")


def test_a_disconnected_machine_is_unreachable_until_the_network_is_healed(
    network: Network,
) -> None:
    one, two = network.add("one"), network.add("two")
    echoing(two)
    with one.entered():
        line = socket.create_connection((two.address, PORT))
    network.cut(two)
    assert not exchanges(line)
    assert not answers(one, two.address)
    network.heal()
    # TCP retransmits lost packets, so the connection survives.
    assert exchanges(line, 30)
    line.close()


def test_packets_can_be_lost_in_one_direction(network: Network) -> None:
    one, two = network.add("one"), network.add("two")
    with one.entered():
        first = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        first.bind((one.address, PORT))
    with two.entered():
        second = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        second.bind((two.address, PORT))
    with first, second:
        network.drop(one, two.address)
        second.settimeout(0.5)
        first.settimeout(5)
        first.sendto(b"lost", (two.address, PORT))
        with pytest.raises(TimeoutError):
            second.recv(100)
        second.sendto(b"arrives", (one.address, PORT))
        assert first.recv(100) == b"arrives"
        network.heal()
        first.sendto(b"again", (two.address, PORT))
        second.settimeout(5)
        assert second.recv(100) == b"again"


def test_a_rate_limit_slows_a_machine(network: Network) -> None:
    one, two = network.add("one"), network.add("two")
    echoing(two)
    network.limit(one, "256kbit")
    with one.entered():
        line = socket.create_connection((two.address, PORT), timeout=30)
    with line:
        began = time.monotonic()
        num = 0
        line.sendall(b"x" * 100_000 + b"\n")
        while num < 100_001:
            num += len(line.recv(1 << 16))
        # 100 kB take 3 s; the first 16 kB pass at once.
        assert time.monotonic() - began > 1.5


def test_an_address_moves_to_another_machine(network: Network) -> None:
    one, two, three = (network.add(name) for name in ("one", "two", "three"))
    address = network.spare_address()
    echoing(two)
    network.give(address, two)
    assert answers(one, address)
    network.give(address, three)
    assert not answers(one, address)
    network.give(address, two)
    assert answers(one, address)


def test_a_machine_is_paused_resumed_and_killed(network: Network) -> None:
    one, two = network.add("one"), network.add("two")
    process = echoing(two)
    two.pause()
    with one.entered():
        line = socket.create_connection((two.address, PORT))
    assert not exchanges(line)
    two.resume()
    assert exchanges(line, 5)
    assert two.kill() == 1
    process.wait(timeout=5)
    assert two.pids() == []
    line.close()


def test_the_leftovers_of_a_crashed_run_are_removed() -> None:
    with Network() as network:
        left = network.add("left").start("sleep", "1000")
        with pytest.raises(NetworkError, match="in use"):
            remove()
        # A crash releases only the lock.
        network._lock.close()
        remove()
        assert left.wait(timeout=5) != 0
        found = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
        assert "hrnet-" not in found.stdout
        remove()
