"""Runs the whole server in the simulated system; `make simulate-server` runs more seeds."""

import os
import subprocess
import sys

import pytest

from stress.simulated_server.__main__ import Totals
from stress.simulated_server.campaign import outcomes


@pytest.mark.timeout(900)
@pytest.mark.parametrize("num_seeds", [15, pytest.param(100, marks=pytest.mark.slow)])
def test_no_seed_of_the_simulated_server_breaks_a_promise(
    num_seeds: int, capsys: pytest.CaptureFixture[str]
) -> None:
    totals = Totals()
    for seed, outcome in outcomes(range(num_seeds), os.cpu_count() or 1):
        totals.add(seed, outcome)
    with capsys.disabled():
        print(f"\n{totals.line()}")
    assert not totals.failed, [(seed, it.failure) for seed, it in totals.failed[:3]]
    assert totals.counts["answers"] > num_seeds, "the runs compare too few answers"
    assert totals.counts["server: killed"] > num_seeds // 10, "the runs are too easy"


def test_a_seed_gives_the_same_run_in_any_process() -> None:
    """Sets and dicts have another order in each process unless the code avoids it.

    The seeds are one of each world.
    """
    program = (
        "from stress.simulated_server.campaign import outcomes\n"
        "for seed, it in sorted(outcomes((0, 3, 5), 1)): print(seed, it.digest, it.num_steps)"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": number},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for number in ("1", "2")
    }
    assert len(runs) == 1, runs
