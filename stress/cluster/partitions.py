"""Breaks a cluster of machines under load: links, machines, clocks and Redis itself.

Gateways, Redis with its replica, HAProxy and the clients have machines of their own, which are
network namespaces. Clients, proxy, oracle and report come from `chaos`. In addition, observers
read the logs through every gateway, and all of their reads must fit into one history.
"""

import argparse
import asyncio
import signal
import sys
import tempfile
import time
from pathlib import Path

from stress.chaos.run import Plan, Run
from stress.cluster.machine_site import MachineFaults, MachineSite
from stress.cluster.machines import Machines
from stress.cluster.network import Network
from stress.cluster.observers import FOREIGN_KEY, OWN_KEY
from stress.site import FLAGS
from tools.harness.tiny_models import make_tiny_model

NUM_CLIENTS = 6


def main() -> int:
    parser = argparse.ArgumentParser(prog="stress.cluster.partitions", description=__doc__)
    parser.add_argument("--faults", type=int, default=50, help="number of faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--kinds", default=",".join(MachineFaults.WEIGHTS), help="kinds of faults to draw from"
    )
    parser.add_argument("--clients", type=int, default=NUM_CLIENTS, help="number of clients")
    options = parser.parse_args()
    kinds = tuple(options.kinds.split(","))
    if unknown := set(kinds) - set(MachineFaults.WEIGHTS):
        parser.error(f"--kinds: {unknown} are unknown; choose from {[*MachineFaults.WEIGHTS]}")
    # Only a program that exits normally removes the network, so SIGTERM must not kill the program.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory(prefix="headrace-machines-") as name, Network() as network:
        folder = Path(name)
        model = make_tiny_model(folder / "model")
        plan = Plan(model, folder, options.faults, options.seed, num_clients=options.clients)
        # In bfloat16, results do not depend on the rest of the batch.
        flags = (*FLAGS, "--dtype", "bfloat16")
        cluster = Machines(network, folder, model, flags, keys=(OWN_KEY, FOREIGN_KEY))
        with cluster.clients.entered():
            return _run(plan, cluster, kinds)


def _run(plan: Plan, cluster: Machines, kinds: tuple[str, ...]) -> int:
    site = MachineSite(cluster, plan.seed)
    run = Run(
        plan,
        lambda line: print(f"{time.strftime('%X')} {line}", flush=True),
        (site, MachineFaults(site, kinds)),
    )
    print(asyncio.run(run.run()), flush=True)
    print(site.summary(), flush=True)
    return 1 if run.report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
