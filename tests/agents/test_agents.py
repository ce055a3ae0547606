"""Coding agents get through long prompts, cuts and kills with their defaults, side by side."""

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
    Desk,
    check,
)
from tests.agents.conftest import CONTEXT, LONG_PROMPT, MODEL, Site

QUESTION = "What is 23 + 45?"


def hits_the_cache(site: Site, *agents: Agent) -> None:
    """Each agent's last request found nearly all of its prompt."""
    for agent in agents:
        last = site.ended(agent.route)[-1]
        num_new = int(last["prompt_tokens"]) - int(last["cached_tokens"])
        assert num_new < 200, f"{agent.name}: {num_new} tokens of {last['prompt_tokens']} were read"


def test_they_get_through_a_killed_engine_and_a_cut_in_long_prompts(site: Site, desk: Desk) -> None:
    site.start()

    def kill() -> None:
        site.wait_for_prompts(len(AGENTS))
        os.kill(site.state["engine"]["pid"], signal.SIGKILL)

    site.wire.gather(len(AGENTS))
    desk.ask_all(QUESTION, meanwhile=kill)
    for agent in AGENTS:
        (only,) = site.ended(agent.route, LONG_PROMPT)  # there was no other try
        assert only["recoveries"] == "1" and only["outcome"] == "finished"
    desk.ask_all("And 2 + 3?", goes_on=True)
    hits_the_cache(site, *AGENTS)

    site.wire.cut_next(len(AGENTS))
    desk.ask_all("And 4 + 5?", goes_on=True)
    assert site.wire.num_cut == len(AGENTS)


def test_they_get_through_a_killed_server_and_show_progress(site: Site, desk: Desk) -> None:
    told = ("--return-progress-for", "agent:*=reasoning")
    site.start(*told)

    def kill() -> None:
        site.wait_for_prompts(len(AGENTS))
        site.server.stop(signal.SIGKILL)
        site.start(*told)

    site.wire.gather(len(AGENTS))
    turns = desk.ask_all(QUESTION, meanwhile=kill)
    for agent, turn in zip(AGENTS, turns, strict=True):
        if agent.thoughts is None:
            continue
        shown = "".join(map(agent.thoughts, turn.events))
        assert "Processing the prompt: " in shown, f"{agent.name}\n{turn.said[-3000:]}"
    desk.ask_all("And 2 + 3?", goes_on=True)
    hits_the_cache(site, *AGENTS)  # of the progress nothing came back


LONG_S = 420.0  # that each prompt is to take
NUM_TOKENS = {"Claude Code": 23_800, "Codex": 18_000, "opencode": 14_500}  # of what each sends


@pytest.mark.skipif(not os.environ.get("LONG"), reason="a prompt of seven minutes: make LONG=1")
def test_each_waits_for_a_prompt_of_seven_minutes(agents: None, tmp_path: Path) -> None:
    """With its defaults, on a server of its own, which answers nothing in words meanwhile."""

    def wait(agent: Agent, site: Site) -> str:
        desk = Desk(tmp_path, site.wire.url, 1200)
        check(agent, desk.ask(agent, QUESTION))
        (only,) = site.ended(agent.route, LONG_PROMPT)  # it asked once
        assert float(only["prompt_ms"]) > 1000 * LONG_S, only
        check(agent, desk.ask(agent, "And 2 + 3?", goes_on=True))
        hits_the_cache(site, agent)
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


def test_codex_takes_the_length_of_the_context_from_the_list_of_models(
    site: Site, desk: Desk, tmp_path: Path
) -> None:
    site.start()
    turn = desk.ask(CODEX_WITH_CATALOG, QUESTION)
    check(CODEX_WITH_CATALOG, turn)
    assert "fallback metadata" not in turn.said
    (file,) = tmp_path.rglob("models_cache.json")
    (model,) = json.loads(file.read_text())["models"]
    assert (model["slug"], model["context_window"]) == (MODEL, CONTEXT)


def test_claude_code_finds_an_alias_and_is_answered_by_a_name_that_fits_a_pattern(
    site: Site, desk: Desk, tmp_path: Path
) -> None:
    site.start(f"--alias=claude-{MODEL}={MODEL}", f"--alias=claude-*={MODEL}")
    check(CLAUDE_WITH_DISCOVERY, desk.ask(CLAUDE_WITH_DISCOVERY, QUESTION))
    (file,) = tmp_path.rglob("gateway-models.json")
    found = json.loads(file.read_text())["models"]
    alias = f"claude-{MODEL}"
    assert found == [{"id": alias, "display_name": f"{alias} ({MODEL})"}]
