"""Kills a server and its engine while clients read streams, and reports what the clients lost."""

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
    parser.add_argument("--kills", type=int, default=50, help="stop after so many kills")
    parser.add_argument("--seed", type=int, default=0, help="seed of requests, cuts and faults")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="stop after so many seconds"
    )
    parser.add_argument("--model", type=Path, help="folder of a model; default: a tiny model")
    parser.add_argument(
        "--models", type=int, default=1, choices=(1, 2), help="number of models to serve"
    )
    parser.add_argument(
        "--max-models", type=int, help="maximum in memory; with 1, two models alternate"
    )
    parser.add_argument(
        "--long-prompts",
        type=int,
        default=0,
        metavar="N",
        help="give some prompts N tokens, and cache prefixes on disk",
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
