"""A short run of the attacks: hostile bodies and requests, and nobody else notices."""

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
def test_no_hostile_client_fails_the_server_or_an_honest_one(tmp_path: Path) -> None:
    run = Run(Plan(tmp_path, NAMES, seed=1, num_each=4, num_tokens=300))
    print(asyncio.run(run.run()))
    assert len(run.bouts) > len(NAMES)
    assert not run.problems
