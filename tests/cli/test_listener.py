"""The addresses that a server listens on."""

import contextlib
import http.server
import socket
import threading
from collections.abc import Iterator

import pytest

from headrace.cli.listener import find_neighbour, listen, port_in_use
from headrace_common.config.settings import HttpConfig


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="the system has no IPv6")
def test_the_unspecified_address_takes_clients_of_both_kinds_of_ip() -> None:
    with listen(HttpConfig(host="::", port=0)) as listener:
        port = listener.getsockname()[1]
        for host in ("127.0.0.1", "::1"):
            socket.create_connection((host, port), timeout=5).close()


@contextlib.contextmanager
def program(body: bytes) -> Iterator[int]:
    """Answer every request with this body, as another program on the port."""

    class Health(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Health) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "localhost"])
def test_a_server_on_this_machine_is_found_for_each_address(host: str) -> None:
    with program(b'{"status":"ok","last_step_age_s":null}') as port:
        assert find_neighbour(HttpConfig(host=host, port=port)) is not None


def test_a_headrace_server_on_the_port_is_named_with_what_to_type(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    with program(b'{"status":"ok","last_step_age_s":1.5}') as port:
        line = port_in_use(HttpConfig(port=port), ["m"])
    before, _, after = line.partition("; stop it, or choose another port: --port ")
    assert before == f"port {port} already has a Headrace server (http://127.0.0.1:{port})"
    free = after.split()[0]
    assert int(free) > port and after == f'{free} (make serve ARGS="m --port {free}")'
    assert len(f"headrace: {line}") <= 160
    assert not caplog.records


@pytest.mark.parametrize("body", [b'{"status":"ok"}', b"[]", b"3", b'"status, error"', b"<html>"])
def test_another_program_on_the_port_is_not_called_headrace(body: bytes) -> None:
    with program(body) as port:
        assert port_in_use(HttpConfig(port=port)).startswith(
            f"port {port} is in use by another program; stop it, or choose another port: --port "
        )


def test_a_program_that_never_answers_does_not_hold_the_message_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert find_neighbour(HttpConfig(port=silent.getsockname()[1])) is None


def test_the_suggested_port_is_free_and_a_long_line_leaves_make_out() -> None:
    with socket.create_server(("127.0.0.1", 65535)):
        line = port_in_use(HttpConfig(port=65534))
        assert "--port 0" in line
    with program(b'{"status":"ok","last_step_age_s":1.5}') as port:
        line = port_in_use(HttpConfig(port=port, api_prefix="/a-prefix/of-many/characters"))
    assert "/a-prefix/of-many/characters)" in line and "make" not in line
    assert len(f"headrace: {line}") <= 160
