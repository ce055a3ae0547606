"""Fixtures with a slow server behind a proxy, and a workspace for the agents."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace_common.checkpoints.find import find_model
from tests.agents.agents import BUILD, MODEL, Workspace, install
from tests.agents.cutter import Cutter
from tools.harness.eventually import eventually
from tools.harness.servers import ServerProcess
from tools.harness.slow_engine import slow

WITHIN_S = 240.0
CONTEXT = 131072
PENALTY = 1.5
LONG_PROMPT = 10_000  # tokens; every agent's own prompt is longer


def long_mini() -> Path:
    """Copy headrace-mini with enough positions for the prompts of agents.

    Its answers to them are nonsense. The penalty keeps it from repeating a word without end.
    """
    folder = BUILD / "mini-long"
    shutil.copytree(find_model("headrace-mini"), folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": CONTEXT}))
    sampling = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(
        json.dumps(sampling | {"repetition_penalty": PENALTY})
    )
    return folder


class Site:
    """A server with a slow engine behind a proxy, so that its address survives restarts.

    `seconds` is the time for 1,000 prompt tokens.
    """

    def __init__(self, seconds: float) -> None:
        self.wire = Cutter()
        self.environment: dict[str, str] = {}
        self._seconds = seconds
        self.server: ServerProcess

    def start(self, *flags: str) -> None:
        given = (str(long_mini()), "--served-model-name", MODEL, "--threads", "1", *flags)
        prefix = slow(self._seconds)
        server = ServerProcess(*given, prefix=prefix, environment=self.environment)
        self.server = server.wait_until_ready()
        self.wire.target = int(self.server.url.rpartition(":")[2])

    @property
    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = httpx.get(f"{self.server.url}/manage/state").json()
        return found

    def wait_for_prompts(self, number: int) -> None:
        """Wait until the server has this many long prompts and computes one of them."""

        def are_read() -> bool:
            rows = self.state["requests"]
            long = [row for row in rows if row["prompt_tokens"] > LONG_PROMPT]
            return len(long) >= number and any(row["state"] == "prompt" for row in long)

        eventually(are_read, within_s=WITHIN_S)

    def ended(self, route: str, longer_than: int = 0) -> list[dict[str, str]]:
        """Return the log fields of a route's finished requests, in the order of their ends."""
        lines = [line for line in self.server.lines if f"route={route} " in line]
        rows = [dict(part.split("=", 1) for part in line.split() if "=" in part) for line in lines]
        return [row for row in rows if int(row["prompt_tokens"]) > longer_than]

    def stop(self) -> None:
        self.wire.close()
        self.server.stop()


@pytest.fixture(scope="session")
def agents() -> None:
    install()


@pytest.fixture
def site() -> Iterator[Site]:
    """Yield a site that the test starts with `site.start(flags)`."""
    made = Site(0.3)
    yield made
    made.stop()


@pytest.fixture
def workspace(agents: None, site: Site, tmp_path: Path) -> Workspace:
    return Workspace(tmp_path, site.wire.url, WITHIN_S)
