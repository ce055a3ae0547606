"""Runs many schedules on all cores, each from its seed."""

from collections.abc import Iterable, Iterator
from multiprocessing import get_context
from typing import NamedTuple

from stress.simulator.simulation import Run, Violation, run_seed


class Verdict(NamedTuple):
    seed: int
    run: Run | None
    violation: str


def judge(seed: int) -> Verdict:
    try:
        return Verdict(seed, run_seed(seed), "")
    except Violation as violation:
        return Verdict(seed, None, str(violation))


def campaign(seeds: Iterable[int], num_processes: int = 2) -> Iterator[Verdict]:
    """Yields the verdicts in the order in which the schedules finish."""
    with get_context("fork").Pool(num_processes) as pool:
        yield from pool.imap_unordered(judge, seeds, chunksize=20)
