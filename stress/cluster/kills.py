"""Kills parts of a whole cluster under load, and says what clients lost.

Two Ray nodes, Redis, two gateways and HAProxy, on one machine. Clients, proxy, oracle and report
are those of `chaos`: here are only other things to kill.
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
"""The most kills of one cluster; each run has a cluster and a seed of its own."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="stress.cluster.kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=50, help=f"in runs of {RUN} at most")
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--kinds", default=",".join(ClusterBlows.WEIGHTS), help="to draw from")
    parser.add_argument("--model", help="a tiny one if not given")
    options = parser.parse_args()
    kinds = tuple(options.kinds.split(","))
    if unknown := set(kinds) - set(ClusterBlows.WEIGHTS):
        parser.error(f"--kinds: {unknown} are none of {[*ClusterBlows.WEIGHTS]}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # its own processes end then, too
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
