"""Runs seeds on all cores, each in a process of its own, and shrinks a run that fails."""

import time
from collections.abc import Iterable, Iterator
from multiprocessing import get_context
from multiprocessing.pool import Pool
from typing import NamedTuple

from detangle._choices import complexity, strip_trailing_zeros

from headrace.fleet.served_model import ServedModel
from stress.simulated_server.run import Outcome, read_model, replay, run_once, strategy_of

_model: ServedModel


def _processes(number: int) -> Pool:
    """Return a pool whose processes run one seed each.

    They are forked from this process, so the model is read only once.
    """
    global _model
    _model = read_model()
    return get_context("fork").Pool(number, maxtasksperchild=1)


def outcomes(seeds: Iterable[int], num_processes: int) -> Iterator[tuple[int, Outcome]]:
    """Yield each seed with its outcome, in the order in which the runs end."""
    with _processes(num_processes) as pool:
        yield from pool.imap_unordered(_run_seed, seeds, chunksize=1)


def _run_seed(seed: int) -> tuple[int, Outcome]:
    return seed, run_once(strategy_of(seed), _model)


def _run_values(values: list[int]) -> Outcome:
    return run_once(replay(values), _model)


class Shrunk(NamedTuple):
    """The simplest run found with the same failure. `num_tried` counts the runs."""

    outcome: Outcome
    num_tried: int


def shrink(outcome: Outcome, num_processes: int, seconds: float) -> Shrunk:
    """Look for a run with fewer decisions that differ from the default, and the same failure.

    A decision of 0 is the default: the oldest task runs next, and nothing fails. Ever smaller
    parts of the decisions are set to 0 or left out, as delta debugging does.
    """
    best, num_tried, ends = outcome, 0, time.monotonic() + seconds
    size = len(best.values) // 2
    with _processes(num_processes) as pool:
        while size and best.values and time.monotonic() < ends:
            size = min(size, len(best.values))
            simpler = None
            for start in range(0, len(best.values), size * num_processes):
                candidates = _without(best.values, start, size, num_processes)
                tried = pool.map(_run_values, candidates, chunksize=1)
                num_tried += len(tried)
                same = [it for it in tried if it.failure and it.signature == outcome.signature]
                simpler = min(same, key=lambda it: complexity(it.values), default=None)
                if simpler is not None and complexity(simpler.values) < complexity(best.values):
                    break
                simpler = None
                if time.monotonic() > ends:
                    break
            if simpler is None:
                size //= 2
            else:
                best = simpler._replace(values=strip_trailing_zeros(simpler.values))
    return Shrunk(best, num_tried)


def _without(values: list[int], start: int, size: int, number: int) -> list[list[int]]:
    """Return `number` copies of the decisions, in each of which another part is 0 or left out."""
    copies = []
    for at in range(start, min(start + size * number, len(values)), size):
        before, part, after = values[:at], values[at : at + size], values[at + size :]
        copies.append([*before, *after])
        if any(part):
            copies.append([*before, *([0] * len(part)), *after])
    return copies
