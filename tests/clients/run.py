"""Real clients, untouched from their packages, against one real server: `make test-clients`.

Each has an environment of its own under build/clients, because their pins conflict. A client that
cannot be installed fails like one that gets a wrong answer.
"""

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tests.checkpoints.small_hub import small_hub
from tools.harness.servers import ServerProcess, running_server
from tools.harness.slow_engine import slow
from tools.harness.tiny_models import make_tiny_model

HERE = Path(__file__).parent
BUILD = HERE.parents[1] / "build" / "clients"
EXAMPLES = HERE.parents[1] / "docs" / "examples"
WITHIN_S = 600.0
NODE = 20
SERVER_FLAGS = ("--heartbeat-s", "1", "--max-num-seqs", "4")
# nothing that a shell has set for another server may reach the clients
FOREIGN = ("OPENAI_", "ANTHROPIC_", "LITELLM_", "LANGCHAIN_", "LANGSMITH_", "HEADRACE_")
FOREIGN += ("PYTHON", "PYTEST_")
QUIET = {
    "NO_PROXY": "127.0.0.1",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LANGSMITH_TRACING": "false",
    "AI_SDK_LOG_WARNINGS": "false",
}


class Client(NamedTuple):
    name: str
    tests: str
    packages: tuple[str, ...]

    @property
    def folder(self) -> Path:
        return BUILD / self.name

    @property
    def is_node(self) -> bool:
        return self.tests.endswith(".mjs")

    @property
    def versions(self) -> str:
        return ", ".join(" ".join(p.replace("==", "@").rsplit("@", 1)) for p in self.packages)


CLIENTS = (
    # litellm imports mcp when it sees tools, without naming it among what it needs
    Client("litellm", "test_litellm.py", ("litellm==1.106.2", "openai==2.54.0", "mcp==2.3.0")),
    Client("instructor", "test_instructor.py", ("instructor==1.17.0", "openai==3.3.0")),
    Client("openai-agents", "test_openai_agents.py", ("openai-agents==0.24.0", "openai==3.54.0")),
    Client(
        "pydantic-ai",
        "test_pydantic_ai.py",
        ("pydantic-ai-slim[openai]==2.68.0", "openai==3.54.0"),
    ),
    Client(
        "langchain-openai",
        "test_langchain_openai.py",
        ("langchain-openai==1.7.3", "openai==3.54.0"),
    ),
    Client(
        "langgraph",
        "test_langgraph.py",
        ("langgraph==1.2.24", "langchain-openai==1.7.3", "openai==3.54.0"),
    ),
    Client("smolagents", "test_smolagents.py", ("smolagents[openai]==1.26.0", "openai==3.54.0")),
    Client("openai", "test_openai.py", ("openai==3.54.0",)),
    Client("openai-responses", "test_openai_responses.py", ("openai==3.54.0",)),
    Client("anthropic", "test_anthropic.py", ("anthropic==2.12.0",)),
    Client(
        "ai-sdk",
        "ai_sdk.mjs",
        (
            "ai@6.0.326",
            "@ai-sdk/openai-compatible@2.0.91",
            "@ai-sdk/anthropic@3.0.140",
            "@anthropic-ai/sdk@1.12.0",
            "zod@4.6.7",
        ),
    ),
    Client(
        "coding-agents",
        "coding_agents.mjs",
        ("@anthropic-ai/claude-code@2.1.197", "@openai/codex@0.169.0"),
    ),
    Client("ollama", "test_ollama.py", ("ollama==0.6.3",)),
    Client("ollama-node", "ollama.mjs", ("ollama@0.6.4",)),
    Client("request-shapes", "test_request_shapes.py", ("httpx==0.28.1",)),
    Client("ws", "ws.mjs", ("ws@8.18.3",)),
    Client(
        "tanstack",
        "tanstack.mjs",
        (
            "@tanstack/ai@0.58.0",
            "@tanstack/ai-client@0.33.2",
            "@tanstack/ai-openai@0.23.1",
            "@durable-streams/client@0.2.7",
        ),
    ),
)
PYTEST = "pytest==9.2.0"
PULLED = "someone/tiny"


class Failure(Exception):
    """The reasons why a client failed, to be read by a person."""


class Runner:
    def __init__(self, within_s: float) -> None:
        self._deadline = time.monotonic() + within_s

    def install(self, client: Client) -> str | None:
        """The failure, if there is one."""
        mark = client.folder / "installed"
        if mark.exists() and mark.read_text() == client.versions:
            return None
        try:
            (self._install_node if client.is_node else self._install_python)(client)
        except Failure as failure:
            return str(failure)
        mark.write_text(client.versions)
        return None

    def test(self, client: Client, server: ServerProcess) -> str:
        """The last line of a passed run."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN)}
        environment |= QUIET | {"HEADRACE_TEST_URL": server.url}
        environment |= {"HEADRACE_TEST_PID": str(server.process.pid)}
        if client.is_node:
            # node looks for packages beside the file
            script = shutil.copy(HERE / client.tests, client.folder)
            for module in (*EXAMPLES.glob("*.mjs"), HERE / "cutter.mjs"):
                shutil.copy(module, client.folder)
            report = "--test-reporter=tap"
            command = ("node", "--test", report, str(script))
            said = self._said(*command, environment=environment, folder=client.folder)
            figures = dict(line[2:].split()[:2] for line in said.splitlines()[-8:])
            return f"{figures['pass']} passed, {figures['skipped']} skipped"
        command = (str(client.folder / "bin" / "python"), "-m", "pytest")
        options = ("-c", str(HERE / "pytest.ini"), str(HERE / client.tests))
        return self._said(*command, *options, environment=environment).splitlines()[-1]

    def _install_python(self, client: Client) -> None:
        python = client.folder / "bin" / "python"
        self._said(sys.executable, "-m", "venv", "--without-pip", "--clear", str(client.folder))
        pip = (sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet")
        self._said(*pip, "--disable-pip-version-check", "--no-compile", PYTEST, *client.packages)

    def _install_node(self, client: Client) -> None:
        if not (shutil.which("node") and shutil.which("npm")):
            raise Failure(f"it needs node {NODE} or later with npm, and they are not installed")
        version = self._said("node", "--version").strip()
        if int(version.lstrip("v").split(".")[0]) < NODE:
            raise Failure(f"it needs node {NODE} or later; this is {version}")
        client.folder.mkdir(parents=True, exist_ok=True)
        (client.folder / "package.json").write_text('{"private": true}\n')
        npm = ("npm", "install", "--no-audit", "--no-fund", "--save-exact")
        self._said(*npm, "--prefix", str(client.folder), *client.packages)

    def _said(
        self,
        *command: str,
        environment: dict[str, str] | None = None,
        folder: Path | None = None,
    ) -> str:
        """The output of a command; Failure, with all of it, if it fails or takes too long."""
        try:
            ended = subprocess.run(
                command,
                env=environment,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=max(1.0, self._deadline - time.monotonic()),
            )
        except subprocess.TimeoutExpired as late:
            said = (late.stdout or b"").decode(errors="replace")
            raise Failure(f"{command[0]} did not end in the time left\n{said}") from None
        if ended.returncode:
            raise Failure(f"{Path(command[0]).name} ended with {ended.returncode}\n{ended.stdout}")
        return ended.stdout.rstrip()


def passes(client: Client, what: Callable[[], str]) -> bool:
    """One line for the client; what failed, below it."""
    began = time.monotonic()
    try:
        result = what()
    except Failure as failure:
        print(f"FAILED {client.name} ({client.versions}): {failure}", flush=True)
        return False
    took = time.monotonic() - began
    print(f"ok     {client.name} ({client.versions}): {result} [{took:.0f} s]", flush=True)
    return True


@contextlib.contextmanager
def pulled_from() -> Iterator[dict[str, str]]:
    """The variables of a server whose hub has one tiny model, and that keeps what it pulls."""
    with contextlib.ExitStack() as undo:
        folder = undo.enter_context(tempfile.TemporaryDirectory())
        repos = {PULLED: make_tiny_model(Path(folder) / "tiny")}
        yield {"HF_ENDPOINT": undo.enter_context(small_hub(repos)).url, "HF_HOME": folder}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    names = [client.name for client in CLIENTS]
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help=f"of {', '.join(names)}")
    parser.add_argument("--within-s", type=float, default=WITHIN_S, help="time for all of it")
    given = parser.parse_args()
    if unknown := set(given.clients) - set(names):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    chosen = [client for client in CLIENTS if client.name in (given.clients or names)]
    runner = Runner(given.within_s)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        wrong = dict(zip(chosen, pool.map(runner.install, chosen), strict=True))

    def result(client: Client, server: ServerProcess) -> str:
        if trouble := wrong[client]:
            raise Failure(trouble)
        return runner.test(client, server)

    # nothing is slower; signs of life that clients count come after 1 s, where it would be 20
    slower = slow(0, "1")
    with (
        pulled_from() as hub,
        running_server(*SERVER_FLAGS, prefix=slower, environment=hub) as server,
    ):
        all_pass = [passes(it, lambda it=it: result(it, server)) for it in chosen]
    return 0 if all(all_pass) else 1


if __name__ == "__main__":
    sys.exit(main())
