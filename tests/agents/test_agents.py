"""Coding agents get through long prompts, cuts and kills with their defaults, side by side."""

import os
import signal

import pytest

from tests.agents.agents import AGENTS, Desk
from tests.agents.conftest import LONG_PROMPT, Site

QUESTION = "What is 23 + 45?"


def hits_the_cache(site: Site) -> None:
    """Each agent's last request found nearly all of its prompt."""
    for agent in AGENTS:
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
    hits_the_cache(site)

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
        assert "Reading the prompt: " in shown, f"{agent.name}\n{turn.said[-3000:]}"
    desk.ask_all("And 2 + 3?", goes_on=True)
    hits_the_cache(site)  # of the progress nothing came back


@pytest.mark.skipif(not os.environ.get("LONG"), reason="a prompt of seven minutes: make LONG=1")
@pytest.mark.parametrize("site", [8.1], indirect=True)
def test_they_wait_for_a_prompt_of_seven_minutes(site: Site, desk: Desk) -> None:
    site.start()
    desk.within_s = 1200
    desk.ask_all(QUESTION)
    assert all(float(site.ended(agent.route)[-1]["prompt_ms"]) > 300_000 for agent in AGENTS)
    assert all(len(site.ended(agent.route, LONG_PROMPT)) == 1 for agent in AGENTS)
    desk.ask_all("And 2 + 3?", goes_on=True)
    hits_the_cache(site)
