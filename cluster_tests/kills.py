"""Kills engines, actors and a worker node under load: `python -m cluster_tests.kills --kills 50`.

Eight streams run at a time over two replicas. After each kill every one of them must end with the
text that it has undisturbed. Then the fleet has to be whole again before the next kill.
"""

import argparse
import os
import random
import signal
import sys
import time
from collections import Counter

from cluster_tests.nodes import RayNode, parent, two_nodes
from tests.eventually import eventually
from tests.replicas import LIMIT_S, at_once, up
from tests.servers import running_server

NUM_STREAMS, NUM_TOKENS = 8, 600
FLAGS = ("--threads", "1", "--max-model-len", "2048", "--max-num-seqs", "8")
VICTIMS = ("engine", "actor", "node")


class KillRun:
    """One server on two nodes, and what became of it."""

    def __init__(self, url: str, address: str, worker: RayNode, seed: int) -> None:
        self.worker = worker
        self._url, self._address = url, address
        self._random = random.Random(seed)
        self.num_changed = self.num_moved = 0
        self.longest_silence_s = 0.0
        self.kills = Counter[str]()

    def run(self, num_kills: int) -> None:
        whole = [it.text for it in at_once(self._url, NUM_STREAMS, NUM_TOKENS, lambda: None)]
        for number in range(num_kills):
            victim = self._random.choice(VICTIMS)
            streams = at_once(self._url, NUM_STREAMS, NUM_TOKENS, lambda it=victim: self._kill(it))
            changed = sum(it.text != text for it, text in zip(streams, whole, strict=True))
            self.num_changed += changed
            self.num_moved += sum(it.num_gaps for it in streams)
            silence_s = max(it.longest_silence_s for it in streams)
            self.longest_silence_s = max(self.longest_silence_s, silence_s)
            print(
                f"{number + 1}: {victim}, {changed} changed, longest silence {silence_s:.1f} s",
                flush=True,
            )
            if victim == "node":
                self.worker.stop()
                self.worker = RayNode.join(self._address)
            eventually(lambda: len(up(self._url)) == 2, LIMIT_S)

    def _kill(self, victim: str) -> None:
        time.sleep(self._random.random())
        pid = self._random.choice(up(self._url))["pid"]
        if victim == "actor":
            pid = parent(pid)
        elif victim == "node":
            assert self.worker.raylet is not None
            pid = self.worker.raylet
        self.kills[victim] += 1
        os.kill(pid, signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser(prog="cluster_tests.kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with two_nodes() as (address, _, worker):
        replicas = ("--cluster", address, "--replicas", "2")
        with running_server("headrace-mini", *replicas, *FLAGS) as server:
            eventually(lambda: len(up(server.url)) == 2, LIMIT_S)
            run = KillRun(server.url, address, worker, options.seed)
            try:
                run.run(options.kills)
            finally:
                run.worker.stop()
    print(
        f"{sum(run.kills.values())} kills ({dict(run.kills)}), {run.num_moved} streams went on "
        f"elsewhere, {run.num_changed} changed, longest silence {run.longest_silence_s:.1f} s"
    )
    return 1 if run.num_changed else 0


if __name__ == "__main__":
    sys.exit(main())
