"""One real server with a key for all tests that do not need their own."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.harness.servers import ServerProcess, running_server

KEY = "secret"


@pytest.fixture(scope="session")
def keyed(folder: Path) -> Iterator[ServerProcess]:
    """A server of the model `tiny`."""
    with running_server(str(folder), "--threads", "1", "--api-key", KEY) as running:
        yield running
