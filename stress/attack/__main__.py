"""Attacks a server of its own beside honest clients, and says what they and it had to bear."""

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
    parser.add_argument("--seconds", type=float, default=_LONG_S, help="begin no attack after")
    parser.add_argument("--seed", type=int, default=0, help="of bodies, cuts and the order")
    parser.add_argument("--only", default="", help="attacks, or how their names begin, with commas")
    parser.add_argument("--round", type=int, default=0, help="begin with the dice of this round")
    parser.add_argument("--rounds", type=int, default=1000, help="how often all of them at most")
    parser.add_argument("--in-turn", action="store_true", help="in the order of --list")
    parser.add_argument(
        "--hostile", action="store_true", help="hostile inputs of all kinds at once"
    )
    parser.add_argument("--list", action="store_true", help="name the attacks and do nothing")
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
        parser.error(f"no attack begins with {options.only}; --list names them")
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
