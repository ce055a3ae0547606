"""A real server with headrace-mini, shared by all tests that do not need their own."""

from collections.abc import Iterator

import pytest

from tools.harness.servers import ServerProcess, running_server


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    with running_server("--max-num-seqs", "64") as running:
        yield running
