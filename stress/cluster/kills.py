"""Kills parts of a whole cluster under load, and reports what clients lost.

Two Ray nodes, Redis, two gateways and HAProxy run on one machine. The clients, the proxy, the
oracle and the report come from `chaos`; only the processes to kill are different.
"""

import argparse
import asyncio
import signal
import sys
import tempfile
import time
from pathlib import Path

from stress.chaos.run import Plan, Run
from stress.cluster.nodes import two_nodes
from stress.cluster.site import ClusterBlows, ClusterSite
from tools.harness.tiny_models import make_tiny_model

NUM_CLIENTS = 8
RUN = 50
"""The largest number of kills for one cluster; each run has its own cluster and seed."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="stress.cluster.kills", description=__doc__)
    parser.add_argument(
        "--kills", type=int, default=50, help=f"number of kills, at most {RUN} in each run"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the first run")
    parser.add_argument(
        "--kinds", default=",".join(ClusterBlows.WEIGHTS), help="kinds of faults to draw from"
    )
    parser.add_argument("--model", help="folder of a model; default: a tiny model")
    options = parser.parse_args()
    kinds = tuple(options.kinds.split(","))
    if unknown := set(kinds) - set(ClusterBlows.WEIGHTS):
        parser.error(f"--kinds: {unknown} are unknown; choose from {[*ClusterBlows.WEIGHTS]}")
    # If the program exits normally, it also stops the processes that it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    num_violations = 0
    for number, first in enumerate(range(0, options.kills, RUN)):
        with tempfile.TemporaryDirectory(prefix="headrace-cluster-") as name:
            folder, kills = Path(name), min(RUN, options.kills - first)
            model = Path(options.model) if options.model else make_tiny_model(folder / "model")
            plan = Plan(model, folder, kills, options.seed + number, num_clients=NUM_CLIENTS)
            num_violations += _run(plan, kinds)
    return 1 if num_violations else 0


def _run(plan: Plan, kinds: tuple[str, ...]) -> int:
    with two_nodes() as nodes:
        site = ClusterSite(plan.model, plan.folder, *nodes)
        run = Run(
            plan,
            lambda line: print(f"{time.strftime('%X')} {line}", flush=True),
            (site, ClusterBlows(site, kinds)),
        )
        print(asyncio.run(run.run()), flush=True)
        return len(run.report.violations)


if __name__ == "__main__":
    sys.exit(main())
