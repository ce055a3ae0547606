"""Steps of a made-up sequence before the first request: they compile kernels and are timed."""

import time
from array import array
from collections.abc import Iterator

from headrace.core.ids import SequenceId, SlotId
from headrace.core.layout import MemoryLayout
from headrace.core.plan import NO_SLOT, Begin, Chunk, StepPlan
from headrace.core.sampling import Sampling
from headrace.runner.runner import Runner

_TRIALS = ((4, 1), (16, 1), (64, 8, 1))
"""Lengths of a sequence's chunks: prompt steps of four sizes, every way through the kernels."""
_NUM_ROUNDS = 4
_NO_MORE_AFTER_S = 4.0
_ID = SequenceId(-1)

Timed = tuple[tuple[int, int], float]
"""Tokens that were computed before and new ones, and the seconds of their step."""


def one_round(runner: Runner, layout: MemoryLayout) -> Iterator[Timed]:
    for lengths in _TRIALS:
        if sum(lengths) < layout.max_positions:
            yield from _trial(runner, layout, lengths)


def timed_steps(runner: Runner, layout: MemoryLayout) -> Iterator[Timed]:
    """Rounds on a warm runner; a slow model is timed for a few seconds only, shortest steps first.

    A chunk of one token is a decode chunk.
    """
    end = time.monotonic() + _NO_MORE_AFTER_S
    for _ in range(_NUM_ROUNDS):
        for timed in one_round(runner, layout):
            yield timed
            if time.monotonic() > end:
                return


def _trial(runner: Runner, layout: MemoryLayout, lengths: tuple[int, ...]) -> Iterator[Timed]:
    total = sum(lengths)
    blocks = array("i", range(layout.blocks_for(total)))
    slot = SlotId(0) if layout.num_slots else NO_SLOT
    ids = array("i", [0] * total)
    begin = Begin(_ID, ids, total, 0, Sampling(temperature=0, ignore_eos=True))
    runner.launch(StepPlan(begun=(begin,))).result()
    start = 0
    try:
        for length in lengths:
            draws = (_ID,) if start + length == total else ()
            chunk = Chunk(_ID, start, length, len(draws), draws, blocks, slot)
            yield (start, length), runner.launch(StepPlan(chunks=(chunk,))).result().seconds
            start += length
    finally:
        runner.launch(StepPlan(ended=(_ID,))).result()
