"""Coding agents from npm, run without a terminal, that can only connect to 127.0.0.1."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "build" / "agents"
PACKAGES = ("@anthropic-ai/claude-code@2.1.331", "@openai/codex@0.169.0", "opencode-ai@1.18.33")
MODEL = "mini"
INSTALL_S = 300
NOBODY = "http://127.0.0.1:9"  # a proxy for other addresses, where nothing listens
Event = dict[str, Any]


class Turn(NamedTuple):
    """One run of an agent: its exit code, the events that it printed, and its whole output."""

    code: int
    events: list[Event]
    said: str


class Agent(NamedTuple):
    """The command line, settings and output format of a coding agent."""

    name: str
    route: str
    words: Callable[[str, bool], list[str]]  # by question, and whether it continues a chat
    settings: Callable[[str, Path], dict[str, str]]  # its environment, by the server's URL
    has_ended: Callable[[list[Event]], bool]  # successfully
    thoughts: Callable[[Event], str] | None  # text that it prints as reasoning, if it prints any


def _claude_words(question: str, continues: bool) -> list[str]:
    shown = ["--output-format", "stream-json", "--verbose", "--model", MODEL]
    return ["claude", "-p", question, *shown, *(["--continue"] if continues else [])]


def _claude_settings(url: str, home: Path) -> dict[str, str]:
    return {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "unused",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_TELEMETRY": "1",
    }


def _claude_thoughts(event: Event) -> str:
    content = event.get("message", {}).get("content", ())
    return "".join(block.get("thinking", "") for block in content if isinstance(block, dict))


def _codex_words(question: str, continues: bool) -> list[str]:
    fixed = ["exec", "--skip-git-repo-check", "-s", "read-only", "--json", "-m", MODEL]
    return ["codex", *fixed, *(["resume", "--last"] if continues else []), question]


def _codex_settings(url: str, home: Path) -> dict[str, str]:
    folder = home / "codex"
    folder.mkdir(exist_ok=True)
    (folder / "config.toml").write_text(
        'model_provider = "headrace"\n'
        "analytics.enabled = false\ncheck_for_update_on_startup = false\n"
        "[model_providers.headrace]\n"
        f'name = "Headrace"\nbase_url = "{url}/v1"\nenv_key = "KEY"\nwire_api = "responses"\n'
        "stream_max_retries = 9\n"  # the default of 5 is too few for a server restart
    )
    return {"CODEX_HOME": str(folder), "KEY": "unused"}


def _catalog_settings(url: str, home: Path) -> dict[str, str]:
    """Configure an API key command, without which Codex does not read the list of models."""
    settings = _codex_settings(url, home)
    file = Path(settings["CODEX_HOME"]) / "config.toml"
    command = '[model_providers.headrace.auth]\ncommand = "/bin/echo"\nargs = ["unused"]\n'
    file.write_text(file.read_text().replace('env_key = "KEY"\n', "") + command)
    return settings


def _opencode_words(question: str, continues: bool) -> list[str]:
    shown = ["--pure", "--format", "json", "--thinking", *(["--continue"] if continues else [])]
    return ["opencode", "run", *shown, question]


def _opencode_settings(url: str, home: Path) -> dict[str, str]:
    limit = {"context": 131072, "output": 1024}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Headrace",
        "options": {"baseURL": f"{url}/v1", "apiKey": "unused"},
        "models": {MODEL: {"name": MODEL, "limit": limit}},
    }
    own = {"share": "disabled", "autoupdate": False, "provider": {"headrace": provider}}
    own |= {"model": f"headrace/{MODEL}", "small_model": f"headrace/{MODEL}"}
    (home / "opencode.json").write_text(json.dumps(own))
    off = ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD")
    flags = {f"OPENCODE_DISABLE_{name}": "1" for name in off}
    return flags | {"OPENCODE_CONFIG": str(home / "opencode.json")}


def _opencode_thoughts(event: Event) -> str:
    part = event.get("part", {})
    return str(part.get("text", "")) if part.get("type") == "reasoning" else ""


def _kinds(events: list[Event]) -> list[str]:
    return [event["type"] for event in events]


AGENTS = (
    Agent(
        "Claude Code",
        "/v1/messages",
        _claude_words,
        _claude_settings,
        lambda events: events[-1].get("subtype") == "success" and not events[-1]["is_error"],
        _claude_thoughts,
    ),
    Agent(
        "Codex",
        "/v1/responses",
        _codex_words,
        _codex_settings,
        lambda events: _kinds(events)[-1] == "turn.completed",
        None,
    ),
    Agent(
        "opencode",
        "/v1/chat/completions",
        _opencode_words,
        _opencode_settings,
        lambda events: _kinds(events)[-1] == "step_finish" and "error" not in _kinds(events),
        _opencode_thoughts,
    ),
)


def _other_name_words(question: str, continues: bool) -> list[str]:
    words = _claude_words(question, continues)
    return ["claude-of-mine" if it == MODEL else it for it in words]


def _discovery_settings(url: str, home: Path) -> dict[str, str]:
    return _claude_settings(url, home) | {"CLAUDE_CODE_ENABLE_GATEWAY_MODEL_DISCOVERY": "1"}


CLAUDE_WITH_DISCOVERY = AGENTS[0]._replace(
    name="Claude Code with discovery", words=_other_name_words, settings=_discovery_settings
)
CODEX_WITH_CATALOG = AGENTS[1]._replace(name="Codex with catalog", settings=_catalog_settings)


def environment_of(home: Path) -> dict[str, str]:
    """Return an environment in which a program reaches nothing but 127.0.0.1."""
    return {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "NO_PROXY": "127.0.0.1",
        **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), NOBODY),
    }


class Workspace:
    """A folder with a home directory per agent, which keeps its conversation between turns."""

    def __init__(self, folder: Path, url: str, within_s: float) -> None:
        self.within_s = within_s
        self._folder, self._url = folder, url

    def ask(self, agent: Agent, question: str, continues: bool = False) -> Turn:
        home = self._folder / agent.name.replace(" ", "-").lower()
        work = home / "work"
        work.mkdir(parents=True, exist_ok=True)
        environment = environment_of(home) | agent.settings(self._url, home)
        program, *words = agent.words(question, continues)
        ended = subprocess.run(
            [str(BUILD / "node_modules" / ".bin" / program), *words],
            cwd=work,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=self.within_s,
        )
        lines = [line for line in ended.stdout.splitlines() if line.startswith("{")]
        return Turn(ended.returncode, list(map(json.loads, lines)), ended.stdout + ended.stderr)

    def ask_all(
        self,
        question: str,
        continues: bool = False,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> list[Turn]:
        """Ask all agents at the same time, and check that each turn succeeds."""
        with ThreadPoolExecutor(len(AGENTS)) as pool:
            asked = [pool.submit(self.ask, agent, question, continues) for agent in AGENTS]
            meanwhile()
            turns = [one.result() for one in asked]
        for agent, turn in zip(AGENTS, turns, strict=True):
            check(agent, turn)
        return turns


def check(agent: Agent, turn: Turn) -> None:
    """Check that the agent's turn has succeeded."""
    is_good = turn.code == 0 and turn.events and agent.has_ended(turn.events)
    assert is_good, f"{agent.name} ended with {turn.code}\n{turn.said[-6000:]}"


def install(packages: Sequence[str] = PACKAGES) -> None:
    """Install the agents into build/agents, unless these versions are installed."""
    mark = BUILD / "installed"
    if mark.exists() and mark.read_text() == " ".join(packages):
        return
    assert shutil.which("npm"), "npm is not installed; it comes with Node 20 or later"
    BUILD.mkdir(parents=True, exist_ok=True)
    (BUILD / "package.json").write_text('{"private": true}\n')
    command = ("npm", "install", "--no-audit", "--no-fund", "--save-exact", *packages)
    subprocess.run(command, cwd=BUILD, check=True, timeout=INSTALL_S, stdout=subprocess.DEVNULL)
    mark.write_text(" ".join(packages))
