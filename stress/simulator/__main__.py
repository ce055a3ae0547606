"""Runs simulated schedules on all cores, and reports which seeds fail."""

import argparse
import os
import sys
import time

from stress.simulator.campaign import campaign
from stress.simulator.simulation import run_seed

REPORT_EVERY = 5000
MAX_SHOWN = 10


def main() -> int:
    parser = argparse.ArgumentParser(prog="stress.simulator", description=__doc__)
    parser.add_argument("-n", type=int, default=10_000, help="number of schedules")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--replay", type=int, help="run one seed and show where it fails")
    options = parser.parse_args()
    if options.replay is not None:
        print(run_seed(options.replay))
        return 0
    return run_many(options.first, options.n)


def run_many(first: int, number: int) -> int:
    began = time.monotonic()
    num_steps = num_preempted = num_guessed = num_done = 0
    violations: list[str] = []
    for verdict in campaign(range(first, first + number), os.cpu_count() or 1):
        num_done += 1
        if verdict.run is None:
            violations.append(verdict.violation)
            if len(violations) <= MAX_SHOWN:
                print(verdict.violation)
                print(f"  replay: python -m stress.simulator --replay {verdict.seed}", flush=True)
        else:
            num_steps += verdict.run.num_steps
            num_preempted += verdict.run.num_preempted
            num_guessed += verdict.run.num_guessed
        if num_done % REPORT_EVERY == 0:
            print(f"{num_done} schedules, {time.monotonic() - began:.0f} s", flush=True)
    print(
        f"{num_done} schedules from seed {first}, {num_steps} steps, {num_preempted} preemptions, "
        f"{num_guessed} speculative tokens, {len(violations)} violations, "
        f"{time.monotonic() - began:.0f} s"
    )
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
