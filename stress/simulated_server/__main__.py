"""Runs seeds on all cores, and tells the story of a seed that fails."""

import argparse
import os
import sys
import time
from collections import Counter
from multiprocessing import get_context

from detangle._choices import decode_token

from headrace.fleet.served_model import ServedModel
from stress.simulated_server.run import Outcome, read_model, replay, run_once, strategy_of

_model: ServedModel

MAX_SHOWN = 5
STORY_LINES = 60


def main() -> int:
    parser = argparse.ArgumentParser(prog="stress.simulated_server", description=__doc__)
    parser.add_argument("-n", type=int, default=1000, help="number of seeds")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--replay", metavar="SEED-OR-TOKEN", help="run one seed and tell its story")
    options = parser.parse_args()
    # Each seed runs in a process that is forked from this one, so the model is read only once.
    global _model
    _model = read_model()
    if options.replay is not None:
        return _show(_one(options.replay))
    return _run_many(range(options.first, options.first + options.n), options.processes)


def _one(given: str) -> Outcome:
    strategy = strategy_of(int(given)) if given.isdigit() else replay(decode_token(given))
    return run_once(strategy, _model)


def _show(outcome: Outcome) -> int:
    for at, text in outcome.story[-STORY_LINES:]:
        print(f"{at:10.3f}  {text}")
    print(outcome.failure or f"no violation; digest {outcome.digest}")
    return 1 if outcome.failure else 0


def _run_many(seeds: range, num_processes: int) -> int:
    began = time.monotonic()
    injected: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    num_failed = num_steps = num_done = 0
    virtual_s = 0.0
    context = get_context("fork")
    with context.Pool(num_processes, maxtasksperchild=1) as pool:
        for seed, outcome in pool.imap_unordered(_seed, seeds, chunksize=1):
            num_done += 1
            injected.update(outcome.injected)
            counts.update(outcome.counts)
            num_steps += outcome.num_steps
            virtual_s += outcome.virtual_s
            if outcome.failure:
                num_failed += 1
                if num_failed <= MAX_SHOWN:
                    print(f"seed {seed}: {outcome.failure}", flush=True)
                    print(f"  replay: python -m stress.simulated_server --replay {seed}")
            if num_done % 500 == 0:
                print(f"{num_done} seeds, {time.monotonic() - began:.0f} s", flush=True)
    seconds = time.monotonic() - began
    print(
        f"{num_done} seeds from {seeds.start}, {num_steps} steps, {virtual_s / 3600:.1f} simulated "
        f"hours, {num_failed} violations, {seconds:.0f} s"
    )
    for kind, number in sorted((injected + counts).items()):
        print(f"  {kind}: {number}")
    return 1 if num_failed else 0


def _seed(seed: int) -> tuple[int, Outcome]:
    return seed, run_once(strategy_of(seed), _model)


if __name__ == "__main__":
    sys.exit(main())
