"""Attacks a real server while honest clients use it, and reports how well both coped."""

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

from stress.attack.run import ATTACKS, Plan, Run, choose
from stress.attack.together import timed

_LONG_S = 120.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="stress.attack", description=__doc__)
    parser.add_argument(
        "--seconds", type=float, default=_LONG_S, help="start no attack after so many seconds"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of bodies, cuts and the order of attacks"
    )
    parser.add_argument(
        "--only", default="", help="names of attacks or their beginnings, separated by commas"
    )
    parser.add_argument(
        "--round",
        type=int,
        default=0,
        help="number of the first round; rounds draw different inputs",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=1000,
        help="maximum number of rounds; a round runs all attacks",
    )
    parser.add_argument(
        "--in-turn", action="store_true", help="run the attacks in the order of --list"
    )
    parser.add_argument(
        "--hostile", action="store_true", help="send hostile inputs of all kinds at the same time"
    )
    parser.add_argument("--list", action="store_true", help="list the attacks and exit")
    options = parser.parse_args()
    if options.list:
        print("\n".join(ATTACKS))
        return 0
    if options.hostile:
        table, problems = asyncio.run(timed(options.seed, options.seconds))
        print(table)
        return 1 if problems else 0
    names = choose(options.only, options.seconds >= _LONG_S)
    if not names:
        parser.error(
            f"no attack has a name that starts with {options.only}; --list shows all names"
        )
    with tempfile.TemporaryDirectory(prefix="headrace-attack-") as name:
        plan = Plan(
            Path(name),
            names,
            options.seed,
            options.seconds,
            options.rounds,
            options.round,
            is_shuffled=not options.in_turn,
            judges_times=True,
        )
        run = Run(plan, lambda line: print(f"{time.strftime('%X')} {line}", flush=True))
        print(asyncio.run(run.run()))
    return 1 if run.problems else 0


if __name__ == "__main__":
    sys.exit(main())
