"""Ends a server and its engine by force while clients read, and says what they lost."""

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

from stress.chaos.run import Plan, Run
from tools.harness.tiny_models import make_tiny_model


def main() -> int:
    parser = argparse.ArgumentParser(prog="stress.chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=50, help="end after so many kills")
    parser.add_argument("--seed", type=int, default=0, help="of requests, cuts and faults")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="or after this time")
    parser.add_argument("--model", type=Path, help="folder of a model; a tiny one if not given")
    parser.add_argument("--models", type=int, default=1, choices=(1, 2), help="served at once")
    parser.add_argument("--max-models", type=int, help="in memory at a time; with 1 they swap")
    parser.add_argument(
        "--long-prompts", type=int, default=0, metavar="N", help="some of N tokens; cached on disk"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headrace-chaos-") as name:
        folder = Path(name)
        positions = 2048 + options.long_prompts
        model = options.model or make_tiny_model(
            folder / "model", max_position_embeddings=positions
        )
        plan = Plan(
            model,
            folder,
            options.kills,
            options.seed,
            options.seconds,
            models=options.models,
            max_models=options.max_models,
            long_prompt=options.long_prompts,
        )
        run = Run(plan, lambda line: print(f"{time.strftime('%X')} {line}", flush=True))
        print(asyncio.run(run.run()))
    return 1 if run.report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
