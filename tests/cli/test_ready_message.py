"""The message of a server that is ready: short lines for people, and a first line for programs."""

import os
import re

import pytest

from headrace.cli.ready_message import models_on_demand, ready_lines
from tools.harness.eventually import eventually
from tools.harness.servers import ServerProcess


def test_a_server_shows_its_url_the_page_and_how_to_stop_in_three_lines(
    keyed: ServerProcess,
) -> None:
    eventually(lambda: any("To stop" in line for line in keyed.lines))
    first = keyed.lines.index(f"Headrace is ready at {keyed.url}: tiny")
    page, stop = keyed.lines[first + 1 : first + 3]
    assert page == f"Chat page: {keyed.url}/ (only from this machine; --host changes that)"
    assert stop == f"To stop the server, press Ctrl-C or run: kill {keyed.process.pid}"
    assert not [line for line in keyed.lines if "stall target" in line]


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]"])
def test_the_page_of_all_addresses_is_one_that_a_browser_can_open(host: str) -> None:
    first, page, _ = ready_lines(f"https://{host}:8443/llm", "tiny", is_local=False)
    assert first == f"Headrace is ready at https://{host}:8443/llm: tiny"
    assert page == "Chat page: https://127.0.0.1:8443/llm/ (elsewhere: use this machine's address)"


def test_the_page_of_one_address_needs_no_explanation() -> None:
    _, page, stop = ready_lines("http://10.0.0.7:8000", "tiny", is_local=False)
    assert page == "Chat page: http://10.0.0.7:8000/"
    assert re.search(rf"\b{os.getpid()}$", stop)


def test_many_models_do_not_make_a_long_line() -> None:
    assert models_on_demand(["a\n", "b"]) == r"a\n, b, loaded on demand"
    assert models_on_demand(list("abcdefg")) == "a, b, c and 4 more, loaded on demand"
