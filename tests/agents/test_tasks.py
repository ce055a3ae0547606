"""Tests that coding agents with a scripted model repair a file despite kills and disconnects."""

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.agents import script
from tests.agents.agents import AGENTS, BUILD, CODEX_WITH_CATALOG, MODEL, ROOT, environment_of
from tests.agents.conftest import Site, long_mini
from tests.agents.terminal import run_in_terminal
from tools.harness.scripted_engine import KILL_ENGINE, KILL_SERVER, scripted

pytestmark = pytest.mark.skipif(
    not os.environ.get("AGENTS_TASKS"), reason="takes minutes: make test-agents-tasks"
)

RECORDS = ROOT / "build" / "terminals"
WITHIN_S = 400.0
COLOR = re.compile(r"\x1b\[[\d;]*m")
# The first piece of the last answer, in the events of each API.
LAST_ANSWER = rb'"(text|delta|content)": ?"D'


class TerminalAgent(NamedTuple):
    """The command line and settings of an agent that runs in a terminal."""

    name: str
    command: Callable[[str], list[str]]
    settings: Callable[[str, Path], dict[str, str]]
    # Whether the agent retries a request if the connection breaks within an answer.
    retries: bool = True


def _aider_settings(url: str, home: Path) -> dict[str, str]:
    off = dict.fromkeys(("AIDER_CHECK_UPDATE", "AIDER_ANALYTICS"), "false")
    return off | {"OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": "unused"}


def _node_22() -> dict[str, str]:
    (node,) = NODE_22.glob("node-linux-*/bin")
    return {"PATH": os.pathsep.join(map(str, (NODE_22 / ".bin", node, os.environ["PATH"])))}


def _pi_settings(url: str, home: Path) -> dict[str, str]:
    """Return the settings of pi, which `headrace launch` configures for the server."""
    folder = home / "pi"
    folder.mkdir()
    # The default of 3 retries may be too few for a server restart.
    (folder / "settings.json").write_text(json.dumps({"retry": {"maxRetries": 5}}))
    return _node_22() | {"PI_CODING_AGENT_DIR": str(folder), "HEADRACE_URL": url}


def _qwen_settings(url: str, home: Path) -> dict[str, str]:
    (home / ".qwen").mkdir()
    off = {"privacy": {"usageStatisticsEnabled": False}, "general": {"enableAutoUpdate": False}}
    (home / ".qwen" / "settings.json").write_text(json.dumps(off))
    server = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "unused", "OPENAI_MODEL": MODEL}
    # Qwen Code would also send requests for 127.0.0.1 to a proxy.
    return _node_22() | server | dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), "")


def _goose_settings(url: str, home: Path) -> dict[str, str]:
    server = {"GOOSE_PROVIDER": "openai", "OPENAI_HOST": url, "OPENAI_API_KEY": "unused"}
    return server | {"GOOSE_MODEL": MODEL, "GOOSE_MODE": "auto", "GOOSE_DISABLE_KEYRING": "1"}


def _goose(task: str) -> list[str]:
    (program,) = (ROOT / "build" / "goose" / "node_modules").glob("@aaif/*/bin/goose")
    return [str(program), "run", "--no-session", "--with-builtin", "developer", "-t", task]


AIDER = str(ROOT / "build" / "aider-venv" / "bin" / "aider")
NODE_22 = ROOT / "build" / "agents-node-22" / "node_modules"
HEADRACE = str(Path(sys.executable).parent / "headrace")
BIN = str(BUILD / "node_modules" / ".bin") + "/"
QWEN = str(NODE_22 / ".bin" / "qwen")
OPEN_QWEN = ("--auth-type", "openai", "--yolo")
CLAUDE = ("--model", MODEL, "--permission-mode", "acceptEdits")
CODEX = ("exec", "-s", "danger-full-access", "-m", MODEL)
OPEN_AIDER = ("--model", f"openai/{MODEL}", "--yes-always", script.FILE, "--message")
TERMINAL_AGENTS = (
    TerminalAgent(
        "claude-code", lambda task: [BIN + "claude", "-p", task, *CLAUDE], AGENTS[0].settings
    ),
    TerminalAgent("codex", lambda task: [BIN + "codex", *CODEX, task], CODEX_WITH_CATALOG.settings),
    TerminalAgent(
        "opencode", lambda task: [BIN + "opencode", "run", "--pure", task], AGENTS[2].settings
    ),
    TerminalAgent("pi", lambda task: [HEADRACE, "launch", "pi", "--", "-p", task], _pi_settings),
    TerminalAgent("qwen-code", lambda task: [QWEN, *OPEN_QWEN, task], _qwen_settings, False),
    TerminalAgent("goose", _goose, _goose_settings, False),
    TerminalAgent("aider", lambda task: [AIDER, *OPEN_AIDER, task], _aider_settings),
)


def _git(folder: Path, *words: str) -> str:
    author = ("-c", "user.name=test", "-c", "user.email=test@example.com")
    command = ["git", *author, *words]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


def repository(folder: Path) -> Path:
    """Create a Git repository with one file whose function has a bug."""
    folder.mkdir(parents=True)
    (folder / script.FILE).write_text(script.BEFORE)
    _git(folder, "init", "-q")
    _git(folder, "add", ".")
    _git(folder, "commit", "-q", "-m", "Add a function")
    return folder


@pytest.fixture
def quick_site() -> Iterator[Site]:
    made = Site(0.05)
    yield made
    made.stop()


@pytest.mark.parametrize("agent", TERMINAL_AGENTS, ids=lambda agent: agent.name)
def test_an_agent_repairs_a_file_despite_kills_and_a_disconnect(
    agent: TerminalAgent, agents: None, quick_site: Site, tmp_path: Path
) -> None:
    site = quick_site
    faults, home = tmp_path / "faults", tmp_path / "home"
    faults.mkdir()
    home.mkdir()
    work = repository(tmp_path / "work")
    site.environment = scripted(script.__name__, long_mini(), faults)
    site.environment["XDG_STATE_HOME"] = str(tmp_path / "state")
    site.start()
    (faults / KILL_ENGINE).write_text(script.RIGHT)
    if agent.retries:
        (faults / KILL_SERVER).write_text("1500")
        site.wire.cut_next(1, LAST_ANSWER)
    first = site.server

    def start_again() -> None:
        first.process.wait()
        if not (faults / KILL_SERVER).exists():
            site.start()

    if agent.retries:
        threading.Thread(target=start_again, daemon=True).start()
    task = f"The function add in {work / script.FILE} returns the difference. Repair it."
    environment = environment_of(home) | agent.settings(site.wire.url, home)
    record = RECORDS / agent.name
    try:
        code = run_in_terminal(agent.command(task), work, environment, record, WITHIN_S)
    finally:
        print(*first.lines, "----", *site.server.lines, sep="\n")
    said = COLOR.sub("", record.read_text(errors="replace"))
    assert code == 0, said[-3000:]
    assert (work / script.FILE).read_text() == script.AFTER, said[-3000:]
    assert script.LAST_WORDS in said
    assert not list(faults.iterdir()) and site.wire.num_cut == agent.retries
    rows = [line for line in first.lines + site.server.lines if " outcome=" in line]
    assert any(" recoveries=1 " in row for row in rows)
    assert not [row for row in rows if not re.search(" outcome=(finished|client_gone) ", row)]
