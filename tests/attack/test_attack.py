"""Tests that a short run of hostile requests does not affect the server or other clients."""

import asyncio
from pathlib import Path

import pytest

from stress.attack.run import Plan, Run, choose

NAMES = choose(
    "worst-unknown-field,worst-prompts-n64,bodies-chat,bodies-completions,bodies-detokenize,"
    "bodies-apply,bodies-streams,http-hostile-queries,http-resets,http-chunked",
    is_long=False,
)


@pytest.mark.timeout(600)
def test_hostile_clients_affect_neither_the_server_nor_other_clients(tmp_path: Path) -> None:
    run = Run(Plan(tmp_path, NAMES, seed=1, num_each=4, num_tokens=300))
    print(asyncio.run(run.run()))
    assert len(run.bouts) > len(NAMES)
    assert not run.problems
