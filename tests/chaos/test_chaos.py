"""Tests that a short run of the chaos test, with kills and lost connections, loses no token."""

import asyncio
from pathlib import Path

import pytest

from stress.chaos.run import Plan, Run
from tools.harness.tiny_models import make_tiny_model

KILLS, SECONDS, CLIENTS = 5, 15.0, 6


@pytest.mark.timeout(900)  # one minute on an idle machine
def test_kills_and_lost_connections_lose_no_token(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    plan = Plan(model, tmp_path, KILLS, seed=1, seconds=SECONDS, num_clients=CLIENTS)
    run = Run(plan, print)
    print(asyncio.run(run.run()))
    assert run.report.facts["kills"] and run.report.facts["cuts"] and run.report.num_tokens
    assert not run.report.violations
