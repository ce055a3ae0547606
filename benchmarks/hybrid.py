"""A hybrid's steps against those of a dense model of equal size, in turn in one process.

    python tools/make_random_model.py --shape qwen3.5-0.5b --out HYBRID
    python tools/make_random_model.py --shape qwen3-0.6b --out DENSE
    python -m benchmarks.hybrid HYBRID DENSE [--rounds 7] [--threads 1]

Each pair of steps is one of either model, right after each other, so a machine that is busy is busy
for both; a ratio is hybrid / dense of one pair. Printed are medians, and of the ratios the middle
half. With one thread, processor time says more than the clock's: it leaves out what others took.
"""

import os

from headrace.engine.child import ENVIRONMENT

os.environ |= ENVIRONMENT | os.environ  # before torch is loaded

import argparse
import itertools
import statistics
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

import torch

from headrace.config.settings import ModelConfig, SchedulerConfig
from headrace.core.ids import SequenceId, SlotId
from headrace.core.plan import NO_SLOT, Begin, Chunk, StepPlan
from headrace.core.sampling import Sampling
from headrace.runner.load import load_runner

_GREEDY = Sampling(temperature=0.0, ignore_eos=True)
_CONTEXT, _PROMPT = 128, 512
_ROOM = 1024  # positions of a sequence
_DECODES = 20  # pairs of steps a round
Times = tuple[float, float]
"""Seconds of the clock, and of the processor."""


class Side:
    """One model, and how long its steps take."""

    def __init__(
        self, folder: Path, threads: int | None, lane: str = "auto", num_streams: int = 4
    ) -> None:
        config = ModelConfig(
            model=str(folder),
            device="cpu",
            lane=lane,  # type: ignore[arg-type]
            threads=threads,
            max_model_len=_ROOM,
            scheduler=SchedulerConfig(max_num_seqs=num_streams),
        )
        self._num_streams = num_streams
        self._runner, ready = load_runner(config, folder)
        self._layout = ready.layout
        self.name = f"{folder.name}, {ready.num_parameters / 1e6:.0f} M, kernels {ready.kernels}"

    def prompt(self) -> Iterator[Times]:
        """A cold prompt in one step, as often as asked."""
        while True:
            self._begin(1, _PROMPT)
            yield self._step([(0, 0, _PROMPT)])

    def decode(self) -> Iterator[Times]:
        """Steps of all streams, as many as a sequence has room for."""
        streams = range(self._num_streams)
        self._begin(self._num_streams, _CONTEXT)
        self._step([(n, 0, _CONTEXT) for n in streams])
        for at in range(_CONTEXT, _ROOM):
            yield self._step([(n, at, 1) for n in streams])

    def _begin(self, count: int, length: int) -> None:
        ids = array("i", torch.randint(0, 1000, (length,)).tolist())
        self._num_known = length
        begun = tuple(Begin(SequenceId(n), ids, length, 0, _GREEDY) for n in range(count))
        ended = tuple(SequenceId(n) for n in range(self._num_streams))
        self._runner.launch(StepPlan(begun=begun, ended=ended)).result()

    def _step(self, shares: list[tuple[int, int, int]]) -> Times:
        plan = StepPlan(chunks=tuple(self._chunk(*share) for share in shares))
        began, used = time.perf_counter(), time.process_time()
        self._runner.launch(plan).result()
        return time.perf_counter() - began, time.process_time() - used

    def _chunk(self, number: int, start: int, length: int) -> Chunk:
        each = self._layout.blocks_for(_ROOM)
        blocks = array("i", range(number * each, (number + 1) * each))
        slot = SlotId(number) if self._layout.num_slots else NO_SLOT
        return Chunk(SequenceId(number), start, length, 1, (SequenceId(number),), blocks, slot)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("hybrid", type=Path)
    parser.add_argument("dense", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    sides = [Side(folder, options.threads) for folder in (options.hybrid, options.dense)]
    print("\n".join(side.name for side in sides), time.strftime("%H:%M:%S"), sep="\n")
    for kind, count in (("decode", _DECODES * options.rounds), ("prompt", options.rounds)):
        both = zip(*(getattr(side, kind)() for side in sides), strict=False)
        pairs = list(itertools.islice(both, 1, count + 1))  # the first of each is a warm-up
        for number, clock in enumerate(("clock", "processor")):
            hybrid, dense = (
                [1e3 * side[number] for side in each] for each in zip(*pairs, strict=True)
            )
            ratios = [h / d for h, d in zip(hybrid, dense, strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            print(
                f"{kind}, {clock}: hybrid {statistics.median(hybrid):.0f} ms, dense "
                f"{statistics.median(dense):.0f} ms, ratio {middle:.2f} ({low:.2f} to {high:.2f}), "
                f"{len(ratios)} pairs"
            )


if __name__ == "__main__":
    main()
