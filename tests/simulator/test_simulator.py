"""Hundreds of schedules with faults, each checked after every call; `make simulate` runs more."""

import os

import pytest

from stress.simulator.campaign import campaign
from stress.simulator.simulation import run_seed


@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_schedules", [300, pytest.param(3000, marks=pytest.mark.slow)])
def test_no_schedule_breaks_an_invariant(
    num_schedules: int, capsys: pytest.CaptureFixture[str]
) -> None:
    verdicts = list(campaign(range(num_schedules), os.cpu_count() or 1))
    violations = [verdict.violation for verdict in verdicts if verdict.violation]
    runs = [verdict.run for verdict in verdicts if verdict.run]
    with capsys.disabled():
        steps, preempted = sum(r.num_steps for r in runs), sum(r.num_preempted for r in runs)
        print(f"\n{len(runs)} schedules, {steps} steps, {preempted} preemptions")
    assert not violations, violations[:5]
    assert len(runs) == num_schedules
    assert preempted > num_schedules // 20, "the schedules are too easy"


@pytest.mark.parametrize("seed", range(20))
def test_equal_inputs_give_equal_plans(seed: int) -> None:
    assert run_seed(seed) == run_seed(seed)


def test_a_suspect_continues_after_the_other_stream_is_preempted() -> None:
    """Seed of a deadlock: both waited for one step, which gave neither of them a chunk."""
    run_seed(21148)


@pytest.mark.parametrize("seed", [103971, 163535])
def test_no_request_starts_in_a_preempting_plan_while_a_suspect_prefills(seed: int) -> None:
    run_seed(seed)


def test_a_first_request_that_waits_for_its_prefill_turn_may_be_passed() -> None:
    """Seed of a plan that passed the request and, later on, freed its prefill turn."""
    run_seed(108711)


def test_a_sibling_of_a_cancelled_leader_comes_first_in_its_queue() -> None:
    """Seed of a sibling that joins the queue during the plan, ahead of an older request."""
    run_seed(339323)
