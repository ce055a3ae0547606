"""Runs seeds on all cores, and tells the story of a seed that fails."""

import argparse
import os
import sys
import time
from collections import Counter

from detangle._choices import decode_token, encode_token

from stress.simulated_server.campaign import outcomes, shrink
from stress.simulated_server.run import Outcome, read_model, replay, run_once, strategy_of

MAX_SHOWN = 5
STORY_LINES = 60
REPORT_EVERY = 500


def main() -> int:
    parser = argparse.ArgumentParser(prog="stress.simulated_server", description=__doc__)
    parser.add_argument("-n", type=int, default=1000, help="number of seeds")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--hours", type=float, help="run until this time instead of -n seeds")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--shrink", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--replay", metavar="SEED-OR-TOKEN", help="run one seed and tell its story")
    options = parser.parse_args()
    if options.replay is not None:
        strategy = (
            strategy_of(int(options.replay))
            if options.replay.isdigit()
            else replay(decode_token(options.replay))
        )
        return _show(run_once(strategy, read_model()))
    ends = time.monotonic() + 3600 * options.hours if options.hours else None
    number = options.n if ends is None else 1 << 40
    seeds = range(options.first, options.first + number)
    totals = _run_many(seeds, options.processes, ends)
    for seed, outcome in totals.failed[:MAX_SHOWN]:
        print(f"\nseed {seed}: {outcome.failure}")
        shrunk = shrink(outcome, options.processes, options.shrink)
        print(f"The story of the simplest of {shrunk.num_tried} runs with this failure:")
        _show(shrunk.outcome)
        print(f"  replay: --replay {seed} or --replay {encode_token(shrunk.outcome.values)}")
    return 1 if totals.failed else 0


def _show(outcome: Outcome) -> int:
    for at, text in outcome.story[-STORY_LINES:]:
        print(f"{at:10.3f}  {text}")
    print(outcome.failure or f"no violation; digest {outcome.digest}")
    return 1 if outcome.failure else 0


class Totals:
    """Sums up the outcomes of many seeds."""

    def __init__(self) -> None:
        self.began = time.monotonic()
        self.num_seeds = self.num_steps = 0
        self.virtual_s = 0.0
        self.counts: Counter[str] = Counter()
        self.failed: list[tuple[int, Outcome]] = []

    def add(self, seed: int, outcome: Outcome) -> None:
        self.num_seeds += 1
        self.num_steps += outcome.num_steps
        self.virtual_s += outcome.virtual_s
        self.counts.update(outcome.injected)
        self.counts.update(outcome.counts)
        if outcome.failure:
            self.failed.append((seed, outcome))

    def line(self) -> str:
        return (
            f"{self.num_seeds} seeds, {self.num_steps} steps, {self.virtual_s / 3600:.1f} "
            f"simulated hours, {len(self.failed)} violations, {time.monotonic() - self.began:.0f} s"
        )


def _run_many(seeds: range, num_processes: int, ends: float | None) -> Totals:
    totals = Totals()
    for seed, outcome in outcomes(seeds, num_processes):
        totals.add(seed, outcome)
        if outcome.failure:
            print(f"seed {seed} fails: {outcome.failure.strip().splitlines()[-1]}", flush=True)
        if totals.num_seeds % REPORT_EVERY == 0:
            print(totals.line(), flush=True)
        if len(totals.failed) >= MAX_SHOWN or (ends is not None and time.monotonic() > ends):
            break
    print(f"from seed {seeds.start}: {totals.line()}")
    for kind, number in sorted(totals.counts.items()):
        print(f"  {kind}: {number}")
    return totals


if __name__ == "__main__":
    sys.exit(main())
