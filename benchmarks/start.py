"""The time from a start to the first answer: with no kernel compiled yet, and with all of them.

python -m benchmarks.start; beside another tree of the sources, in turn on the same machine:
python -m benchmarks.start --beside ../other/src. Medians, and of ratios of neighbours in time.
"""

import argparse
import compileall
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

from tools.harness.processes import free_port

_LIMIT_S = 600
_BODY = {"prompt": "The days of the week are", "max_tokens": 1, "temperature": 0}
_TREES = {"this": "src"}

Seconds = dict[str, dict[str, list[float]]]
"""By kind of start, then by tree, round by round."""


def first_answer_s(tree: str, model: str, caches: Path) -> float:
    """Seconds from the start of a server of that tree to the end of its first answer."""
    port = free_port()
    environment = {
        **os.environ,
        "PYTHONPATH": tree,
        "XDG_CACHE_HOME": str(caches),
        "NUMBA_CACHE_DIR": str(caches),
    }
    command = [sys.executable, "-m", "headrace", "serve", model, "--port", str(port)]
    began = time.monotonic()
    server = subprocess.Popen(
        [*command, "--state-dir", "none"], env=environment, stderr=subprocess.DEVNULL
    )
    try:
        while not _is_answered(port):
            if server.poll() is not None or time.monotonic() > began + _LIMIT_S:
                raise RuntimeError(f"the server of {tree} gave no answer")
            time.sleep(0.05)
        return time.monotonic() - began
    finally:
        server.terminate()
        server.wait()


def _is_answered(port: int) -> bool:
    try:
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=_BODY, timeout=_LIMIT_S)
    except httpx.TransportError:
        return False
    return answer.status_code == 200


def measure(trees: dict[str, str], model: str, num_rounds: int) -> Seconds:
    found: Seconds = {kind: {name: [] for name in trees} for kind in ("first", "warm")}
    for number in range(num_rounds):
        for name, tree in trees.items():
            with tempfile.TemporaryDirectory() as caches:
                for kind in found:
                    seconds = first_answer_s(tree, model, Path(caches))
                    found[kind][name].append(seconds)
                    print(f"round {number + 1}, {name}, {kind}: {seconds:.1f} s", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--beside", help="the src folder of another tree")
    parser.add_argument("--model", default="headrace-mini")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    trees = _TREES | ({"other": given.beside} if given.beside else {})
    for tree in trees.values():
        compileall.compile_dir(tree, quiet=2)  # as an installation does
    for kind, sides in measure(trees, given.model, given.rounds).items():
        told = [f"{name} {statistics.median(taken):.1f} s" for name, taken in sides.items()]
        if given.beside:
            ratios = [a / b for a, b in zip(sides["this"], sides["other"], strict=True)]
            spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
            told.append(f"ratio {statistics.median(ratios):.2f}, {spread}")
        print(f"{kind:5}  {', '.join(told)}")


if __name__ == "__main__":
    main()
