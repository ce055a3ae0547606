"""The addresses that a server listens on."""

import socket

import pytest

from headrace.cli.listener import listen
from headrace_common.config.settings import HttpConfig


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="the system has no IPv6")
def test_the_unspecified_address_takes_clients_of_both_kinds_of_ip() -> None:
    with listen(HttpConfig(host="::", port=0)) as listener:
        port = listener.getsockname()[1]
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, port), timeout=5).close()
