"""Tests that coding agents with default settings survive long prompts, disconnects and kills."""

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.agents.agents import (
    AGENTS,
    CLAUDE_WITH_DISCOVERY,
    CODEX_WITH_CATALOG,
    Agent,
    Workspace,
    check,
)
from tests.agents.conftest import CONTEXT, LONG_PROMPT, MODEL, Site

QUESTION = "What is 23 + 45?"


def check_cache_hits(site: Site, *agents: Agent) -> None:
    """Check that nearly the whole prompt of each agent's last request was cached."""
    for agent in agents:
        last = site.ended(agent.route)[-1]
        num_new = int(last["prompt_tokens"]) - int(last["cached_tokens"])
        assert num_new < 200, f"{agent.name}: {num_new} tokens of {last['prompt_tokens']} were read"


def test_agents_survive_an_engine_kill_and_a_disconnect_in_long_prompts(
    site: Site, workspace: Workspace
) -> None:
    site.start()

    def kill() -> None:
        site.wait_for_prompts(len(AGENTS))
        os.kill(site.state["engine"]["pid"], signal.SIGKILL)

    site.wire.gather(len(AGENTS))
    workspace.ask_all(QUESTION, meanwhile=kill)
    for agent in AGENTS:
        (only,) = site.ended(agent.route, LONG_PROMPT)  # without a retry
        assert only["recoveries"] == "1" and only["outcome"] == "finished"
    workspace.ask_all("And 2 + 3?", continues=True)
    check_cache_hits(site, *AGENTS)

    site.wire.cut_next(len(AGENTS))
    workspace.ask_all("And 4 + 5?", continues=True)
    assert site.wire.num_cut == len(AGENTS)


def test_agents_survive_a_server_kill_and_show_progress(site: Site, workspace: Workspace) -> None:
    flags = ("--return-progress-for", "agent:*=reasoning")
    site.start(*flags)

    def kill() -> None:
        site.wait_for_prompts(len(AGENTS))
        site.server.stop(signal.SIGKILL)
        site.start(*flags)

    site.wire.gather(len(AGENTS))
    turns = workspace.ask_all(QUESTION, meanwhile=kill)
    for agent, turn in zip(AGENTS, turns, strict=True):
        if agent.thoughts is None:
            continue
        shown = "".join(map(agent.thoughts, turn.events))
        assert "Processing the prompt: " in shown, f"{agent.name}\n{turn.said[-3000:]}"
    workspace.ask_all("And 2 + 3?", continues=True)
    check_cache_hits(site, *AGENTS)  # agents must not send the progress back


LONG_S = 420.0  # time per prompt
NUM_TOKENS = {
    "Claude Code": 23_800,
    "Codex": 18_000,
    "opencode": 14_500,
}  # in each agent's first prompt


@pytest.mark.skipif(not os.environ.get("LONG"), reason="a prompt of seven minutes: make LONG=1")
def test_each_agent_waits_seven_minutes_for_a_prompt(agents: None, tmp_path: Path) -> None:
    """Give each agent its own server, which sends no text while it computes the prompt."""

    def wait(agent: Agent, site: Site) -> str:
        workspace = Workspace(tmp_path, site.wire.url, 1200)
        check(agent, workspace.ask(agent, QUESTION))
        (only,) = site.ended(agent.route, LONG_PROMPT)  # without a retry
        assert float(only["prompt_ms"]) > 1000 * LONG_S, only
        check(agent, workspace.ask(agent, "And 2 + 3?", continues=True))
        check_cache_hits(site, agent)
        return f"{agent.name}: {only['prompt_tokens']} tokens in {only['prompt_ms']} ms"

    with ExitStack() as stack, ThreadPoolExecutor(len(AGENTS)) as pool:
        sites = [Site(1.05 * 1000 * LONG_S / NUM_TOKENS[agent.name]) for agent in AGENTS]
        for site in sites:
            site.start()
            stack.callback(site.stop)
        waits = [pool.submit(wait, *one) for one in zip(AGENTS, sites, strict=True)]
        for one in waits:
            print(one.exception() or one.result())
    assert not any(one.exception() for one in waits)


def test_codex_reads_the_context_length_from_the_list_of_models(
    site: Site, workspace: Workspace, tmp_path: Path
) -> None:
    site.start()
    turn = workspace.ask(CODEX_WITH_CATALOG, QUESTION)
    check(CODEX_WITH_CATALOG, turn)
    assert "fallback metadata" not in turn.said
    (file,) = tmp_path.rglob("models_cache.json")
    (model,) = json.loads(file.read_text())["models"]
    assert (model["slug"], model["context_window"]) == (MODEL, CONTEXT)


def test_claude_code_discovers_an_alias_and_can_use_an_alias_pattern(
    site: Site, workspace: Workspace, tmp_path: Path
) -> None:
    site.start(f"--alias=claude-{MODEL}={MODEL}", f"--alias=claude-*={MODEL}")
    check(CLAUDE_WITH_DISCOVERY, workspace.ask(CLAUDE_WITH_DISCOVERY, QUESTION))
    (file,) = tmp_path.rglob("gateway-models.json")
    found = json.loads(file.read_text())["models"]
    alias = f"claude-{MODEL}"
    assert found == [{"id": alias, "display_name": f"{alias} ({MODEL})"}]
