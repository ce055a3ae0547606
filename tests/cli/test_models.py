"""`headrace models`: its output for servers that answer, refuse or are down."""

import socket

import pytest
from click.testing import CliRunner, Result

from headrace.cli.models import entries_of, models
from headrace_common.errors import HeadraceError
from tests.cli.conftest import KEY
from tools.harness.servers import ServerProcess


def list_of(*words: str, key: str | None = None) -> Result:
    return CliRunner().invoke(models, words, env={"HEADRACE_API_KEY": key})


def fault_of(*words: str, key: str | None = None) -> str:
    fault = list_of(*words, key=key).exception
    assert isinstance(fault, HeadraceError), fault
    return str(fault)


def test_a_key_is_needed_and_an_address_may_be_short(keyed: ServerProcess) -> None:
    short = keyed.url.removeprefix("http://")
    for given in ((), ("--api-key", "wrong")):
        assert "does not accept this API key" in fault_of("--url", short, *given)
    for shown in (
        list_of("--url", short, "--api-key", KEY),
        list_of("--url", f"{keyed.url}/v1", key=KEY),
    ):
        assert shown.exit_code == 0, shown.exception
        assert shown.output.splitlines()[1].split()[:2] == ["tiny", "loaded"]


@pytest.mark.parametrize("address", ["127.0.0.1:{}", "http://127.0.0.1:{}/"])
def test_a_server_that_is_not_there(address: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    fault = fault_of("--url", address.format(port))
    assert fault.startswith(f"No server answers (127.0.0.1:{port}: ") and "--url" in fault


def test_a_list_of_another_kind_of_server() -> None:
    for body in (b'{"data": [{"id": "llama", "object": "model"}]}', b'{"data": [1]}', b"{}"):
        with pytest.raises(HeadraceError, match="not in Headrace's format"):
            entries_of(body)


def test_an_address_that_is_none() -> None:
    assert "is not a server's address" in fault_of("--url", "http://")
