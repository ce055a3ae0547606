"""Steps of eight streams over four adapters against those of the base, in turn in one process.

    python -m benchmarks.adapters [--pairs 10] [--rank 16] [--quantize none] [--model FOLDER]

A model of the shape qwen3-0.6b with made-up weights is written to build/ first. Each pair is the
median of some decode steps of both; a step of the base runs the code that runs without adapters.
"""

import argparse
import statistics
import time
from array import array
from pathlib import Path

import torch

from headrace.checkpoints.adapters import name_adapter
from headrace.checkpoints.spec import read_spec
from headrace.config.settings import ModelConfig, SchedulerConfig
from headrace.core.ids import SequenceId
from headrace.core.plan import Chunk
from headrace.runner.load import load_runner
from headrace.runner.runner import Runner
from tools.harness.tiny_adapters import ATTENTION, MLP, make_adapter
from tools.make_random_model import make_random_model

STREAMS, ADAPTERS, CONTEXT, STEPS = 8, 4, 256, 15
SHAPE = "qwen3-0.6b"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--quantize", default="none")
    parser.add_argument("--model", type=Path, default=Path("build") / SHAPE)
    options = parser.parse_args()
    runner = _runner(options.model, options.quantize)
    without = _median(runner, [""] * STREAMS)
    adapters = _loaded(runner, options.model, options.rank)
    _median(runner, adapters)  # captures
    pairs = [_pair(runner, adapters, number) for number in range(options.pairs)]
    ratios = sorted(adapted / base for base, adapted in pairs)
    base, adapted = (statistics.median(times) for times in zip(*pairs, strict=True))
    print(f"{STREAMS} streams, {ADAPTERS} adapters of rank {options.rank}, {SHAPE}")
    print(f"base before any was loaded {1000 * without:.2f} ms")
    print(f"base {1000 * base:.2f} ms, adapters {1000 * adapted:.2f} ms")
    low, high = ratios[0], ratios[-1]
    print(f"ratio {statistics.median(ratios):.3f} ({low:.3f} to {high:.3f}), {len(pairs)} pairs")


def _runner(folder: Path, quantize: str) -> Runner:
    if not folder.exists():
        make_random_model(folder, SHAPE)
    config = ModelConfig(
        device="cpu",
        dtype="bfloat16",
        quantize=quantize,  # type: ignore[arg-type]
        kv_cache_memory_bytes=1 << 30,
        max_model_len=CONTEXT + 64,
        scheduler=SchedulerConfig(max_num_seqs=STREAMS),
    )
    return load_runner(config, folder)[0]


def _loaded(runner: Runner, base: Path, rank: int) -> list[str]:
    """The fingerprint of each stream's adapter."""
    found = []
    for number in range(ADAPTERS):
        folder = base.parent / f"{base.name}-adapter-{rank}-{number}"
        if not folder.exists():
            make_adapter(folder, base, rank, ATTENTION + MLP, number)
        adapter = name_adapter(str(number), folder, read_spec(base).architecture)
        runner.put_adapter(runner.read_adapter(adapter))
        found.append(adapter.fingerprint)
    return [found[number % ADAPTERS] for number in range(STREAMS)]


def _pair(runner: Runner, adapters: list[str], number: int) -> tuple[float, float]:
    """Seconds of a step of the base and of one with adapters; who comes first alternates."""
    if number % 2:
        adapted = _median(runner, adapters)
        return _median(runner, [""] * STREAMS), adapted
    return _median(runner, [""] * STREAMS), _median(runner, adapters)


@torch.inference_mode()
def _median(runner: Runner, adapters: list[str]) -> float:
    """Seconds of forward and head of a decode step."""
    times, num_blocks = [], -(-(CONTEXT + 64) // 32)
    for step in range(STEPS):
        chunks = [
            Chunk(
                SequenceId(n),
                CONTEXT + step,
                1,
                1,
                (),
                array("i", range(n * num_blocks, (n + 1) * num_blocks)),
                adapter=adapter,
            )
            for n, adapter in enumerate(adapters)
        ]
        began = time.perf_counter()
        runner.lane.logits(runner.forward(chunks, [array("i", [n + 1]) for n in range(STREAMS)]))
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:])


if __name__ == "__main__":
    main()
