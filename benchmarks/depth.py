"""Steps behind a long context, and what of their time is the context's; no prompt is read for it.

    python tools/make_random_model.py --shape qwen3-0.6b --out DENSE
    python -m benchmarks.depth DENSE [--depths 8192 32768 100000] [--prompts 4096 16384]

The blocks of the cache are filled with keys and values of other positions, copied, so that a depth
costs nothing to reach. `depth ms` is a step's time less that of the same step at position 0; beside
it stand the keys and values that it must read once, and how much of the depth's time reading them
at this machine's own rate would take: 1 is bound by memory. A chunk of a prompt reads them once for
128 queries, and is bound by products: its last column is their share.
The model's own limit of positions is not kept: what it computes is noise anyway.
"""

import os

from headrace.engine.child import ENVIRONMENT

os.environ |= ENVIRONMENT | os.environ  # before torch is loaded

import argparse
import json
import statistics
import tempfile
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.machine import Machine, measure
from headrace.checkpoints.spec import read_spec
from headrace.config.settings import ModelConfig, SchedulerConfig
from headrace.core.cache import bytes_per_position, bytes_per_slot
from headrace.core.ids import BlockId, SequenceId, SlotId
from headrace.core.plan import NO_SLOT, Begin, BlockCopy, Chunk, StepPlan
from headrace.core.sampling import Sampling
from headrace.runner.lanes.native_text import NativeText
from headrace.runner.load import load_runner
from headrace.runner.runner import Runner

_GREEDY = Sampling(temperature=0.0, ignore_eos=True)
_CHUNK = 512  # what a step on a CPU computes at most
_STREAMS = 4
_SLOTS = 3 * _STREAMS  # with the snapshots that a lane adds
_STEPS = {"decode 1": (1, 1), "decode 4": (4, 1), "prompt 128": (1, 128), "prompt 512": (1, 512)}
"""Sequences, and the tokens of each."""


class Cost(NamedTuple):
    """The bytes that attention must read for one step, and its operations."""

    kv_bytes: int
    operations: int


class DeepModel:
    """A model whose cache holds one sequence of `positions`; others share its blocks."""

    def __init__(self, folder: Path, positions: int, threads: int | None) -> None:
        spec = read_spec(folder)
        cache, size = NativeText.cache_of(spec), 2
        self._kv_bytes = bytes_per_position(cache, size)
        dims = [layer.key_dim for layer in cache if layer.num_kv_heads]
        self._operations = 4 * spec.config["num_attention_heads"] * sum(dims)
        positions += _CHUNK + 1
        config = ModelConfig(
            model=str(folder),
            device="cpu",
            threads=threads,
            max_model_len=positions,
            kv_cache_memory_bytes=(positions + 64) * self._kv_bytes
            + (_SLOTS + 1) * bytes_per_slot(cache, size),
            scheduler=SchedulerConfig(max_num_seqs=_STREAMS),
        )
        self._runner: Runner
        self._runner, self.ready = load_runner(config, folder)
        self._blocks = self.ready.layout.num_blocks
        self._block_size = self.ready.layout.block_size
        ids = torch.randint(0, 1000, (positions,), dtype=torch.int32)
        self._ids = array("i", ids.numpy().tobytes())
        self._begin()

    def fill(self) -> None:
        """Computes one chunk, and copies its blocks to all others."""
        self._step([(0, 0, _CHUNK)])
        first = _CHUNK // self._block_size
        copies = [BlockCopy(BlockId(b % first), BlockId(b)) for b in range(first, self._blocks)]
        self._runner.launch(StepPlan(block_copies=tuple(copies))).result()

    def prompt(self, length: int) -> float:
        """Seconds of a whole prompt, in steps as large as they get."""
        began = time.perf_counter()
        for start in range(0, length, _CHUNK):
            self._step([(0, start, min(_CHUNK, length - start))])
        return time.perf_counter() - began

    def seconds(self, name: str, depth: int, at_least: float) -> float:
        """The median time of that step, which is repeated for some seconds."""
        rows, length = _STEPS[name]
        times: list[float] = []
        while sum(times) < at_least or len(times) < 2:
            began = time.perf_counter()
            self._step([(row, depth, length) for row in range(rows)])
            times.append(time.perf_counter() - began)
        return statistics.median(times[1:])

    def cost(self, name: str, depth: int) -> Cost:
        rows, length = _STEPS[name]
        return Cost(rows * depth * self._kv_bytes, rows * length * depth * self._operations)

    def _begin(self) -> None:
        begun = [
            Begin(SequenceId(n), self._ids, len(self._ids), 0, _GREEDY) for n in range(_STREAMS)
        ]
        self._runner.launch(StepPlan(begun=tuple(begun))).result()

    def _step(self, shares: list[tuple[int, int, int]]) -> None:
        plan = StepPlan(chunks=tuple(self._chunk(*share) for share in shares))
        self._runner.launch(plan).result()

    def _chunk(self, number: int, start: int, length: int) -> Chunk:
        """Sequence `number` begins in another place of the cache than those before it."""
        count = -(-(start + length) // self._block_size)
        first = number * self._blocks // _STREAMS
        blocks = array("i", ((first + i) % self._blocks for i in range(count)))
        slot = SlotId(number) if self.ready.layout.num_slots else NO_SLOT
        rows = int(length == 1)
        draws = (SequenceId(number),) * rows
        return Chunk(SequenceId(number), start, length, rows, draws, blocks, slot)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--depths", type=int, nargs="*", default=[8192, 32768, 100_000])
    parser.add_argument("--prompts", type=int, nargs="*", default=[4096, 16384])
    parser.add_argument("--steps", nargs="*", choices=_STEPS, default=list(_STEPS))
    parser.add_argument("--seconds", type=float, default=1.0, help="per step and depth, at least")
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    positions = max([_CHUNK, *options.depths, *options.prompts])
    with tempfile.TemporaryDirectory() as folder:
        _stretch(options.model, Path(folder), positions + _CHUNK + 1)
        model = DeepModel(Path(folder), positions, options.threads)
        for line in _lines(model, measure(), options):
            print(line, flush=True)


def _stretch(model: Path, folder: Path, positions: int) -> None:
    """The same model with as many positions."""
    for file in model.iterdir():
        (folder / file.name).symlink_to(file.resolve())
    config = json.loads((model / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": positions}))


def _lines(model: DeepModel, machine: Machine, options: argparse.Namespace) -> Iterator[str]:
    ready, gb = model.ready, 1e9
    yield (
        f"{options.model.name}: {ready.num_parameters / 1e6:.0f} M, kernels {ready.kernels}, "
        f"{torch.get_num_threads()} threads, reads {machine.read_bytes_per_s / gb:.1f} GB/s, "
        f"multiplies {machine.ops_per_s(ready.dtype) / gb:.0f} GOP/s, {time.strftime('%H:%M:%S')}"
    )
    model.fill()
    head = f"{'step':12} {'depth':>7} {'ms':>9} {'depth ms':>9} "
    yield head + f"{'KV GB':>6} {'reading':>8} {'products':>8}"
    for name in options.steps:
        at_zero = model.seconds(name, 0, options.seconds)
        yield f"{name:12} {0:7} {1e3 * at_zero:9.1f}"
        for depth in options.depths:
            seconds, cost = model.seconds(name, depth, options.seconds), model.cost(name, depth)
            own = max(seconds - at_zero, 1e-3)
            reading = cost.kv_bytes / machine.read_bytes_per_s / own
            products = cost.operations / machine.ops_per_s(ready.dtype) / own
            yield (
                f"{name:12} {depth:7} {1e3 * seconds:9.1f} {1e3 * own:9.1f} "
                f"{cost.kv_bytes / gb:6.2f} {reading:8.2f} {products:8.2f}"
            )
    for length in options.prompts:
        seconds = model.prompt(length)
        yield f"whole prompt {length:6} {seconds:9.1f} s {length / seconds:9.0f} tokens/s"


if __name__ == "__main__":
    main()
