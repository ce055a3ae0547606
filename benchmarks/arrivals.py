"""Measures waiting times and token gaps when long prompts arrive at a given rate.

    python -m benchmarks.arrivals [MODEL] [--rates 1 2 4] [--lengths 4096 8192] [--warm 0 .5 .9]
    python -m benchmarks.arrivals --url http://127.0.0.1:8000

Each cell is one rate, length and warm share. The cell's requests are sent on schedule, whether
or not earlier requests have ended, and generate 32 tokens each. The warm share is the fraction
of requests that repeat one of four prompts, except for the last 512 tokens. These four prompts
are processed before the cell. Without MODEL, a tiny model is served, so that the result shows
the cost of serving alone.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import secrets
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from headrace.bench.figures import spread
from headrace.bench.target import ServerSaid, Target
from tools.harness.servers import running_server
from tools.make_random_model import make_random_model

_TURN = 512
_NUM_BASES = 4
_ANSWER = 32
_PATIENCE_S = 120.0


class Cell:
    """The requests of one rate, length and warm share, and when their tokens arrived."""

    def __init__(self, target: Target, rate: float, length: int, warm: float, seed: int) -> None:
        self._target, self._rate, self._length, self._warm = target, rate, length, warm
        self._random = random.Random(f"{seed} {rate} {length} {warm}")
        self._bases = [self._fresh(length - _TURN) for _ in range(_NUM_BASES)]
        self.first_s: list[float] = []
        self.gaps_s: list[float] = []
        self.num_failed = 0

    async def run(self, count: int) -> None:
        if self._warm:
            for base in self._bases:
                await self._target.first_token(base)
        async with asyncio.TaskGroup() as tasks:
            due = time.perf_counter()
            for _ in range(count):
                tasks.create_task(self._ask(self._prompt()))
                due += self._random.expovariate(self._rate)
                await asyncio.sleep(due - time.perf_counter())

    def line(self) -> str:
        first, gaps = spread(self.first_s), spread(self.gaps_s)
        waits = "".join(f" {first.get(name, 0):8.0f}" for name in ("p50", "p95", "max"))
        stalls = "".join(f" {gaps.get(name, 0):8.1f}" for name in ("p50", "p99", "max"))
        head = f"{self._rate:5g} {self._length:7} {self._warm:5.2f}"
        return f"{head}{waits} {stalls} {self.num_failed:7}"

    def _fresh(self, length: int) -> list[int]:
        # Special tokens are at the end of the vocabulary.
        plain = self._target.num_vocab * 9 // 10
        return [self._random.randrange(plain) for _ in range(length)]

    def _prompt(self) -> list[int]:
        if self._random.random() < self._warm:
            return self._random.choice(self._bases) + self._fresh(_TURN)
        return self._fresh(self._length)

    async def _ask(self, prompt: list[int]) -> None:
        sent, times = time.perf_counter(), []
        try:
            async with asyncio.timeout(_PATIENCE_S):
                async for at in self._target.tokens(prompt, _ANSWER):
                    times.append(at)
        except (TimeoutError, ServerSaid, httpx.HTTPError):
            self.num_failed += 1
        if times:
            self.first_s.append(times[0] - sent)
            self.gaps_s += [b - a for a, b in itertools.pairwise(times)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--url", help="URL of a running server")
    parser.add_argument(
        "--rates", type=float, nargs="*", default=[1.0, 2.0, 4.0], help="requests per second"
    )
    parser.add_argument("--lengths", type=int, nargs="*", default=[4096, 8192, 12288])
    parser.add_argument("--warm", type=float, nargs="*", default=[0.0, 0.5, 0.9])
    parser.add_argument("--requests", type=int, default=16, help="requests per cell")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with _server(options) as url:
        asyncio.run(_measure(url, options))


@contextlib.contextmanager
def _server(options: argparse.Namespace) -> Iterator[str]:
    if options.url:
        yield options.url
        return
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or _tiny(Path(folder), max(options.lengths) + _ANSWER)
        with running_server(str(model), environment={"OMP_NUM_THREADS": "2"}) as server:
            print(server.lines[-1])
            yield server.url


def _tiny(folder: Path, positions: int) -> Path:
    """Make a tiny model with `positions` positions. Each of its tokens has a text."""
    make_random_model(folder, "tiny")
    config = folder / "config.json"
    given = json.loads(config.read_text())
    config.write_text(json.dumps(given | {"max_position_embeddings": positions}))
    return folder


async def _measure(url: str, options: argparse.Namespace) -> None:
    target = Target(url, "", secrets.token_hex(8))
    async with target.http:
        await target.learn_model()
        print(f"{'':19}{'ms to the first token':>27} {'ms between tokens':>27}")
        names = "".join(f" {name:>8}" for name in ("p50", "p95", "max", "p50", "p99", "max"))
        print(f"{'rate':>5} {'length':>7} {'warm':>5}{names[:27]} {names[27:]} {'failed':>7}")
        for cell in itertools.product(options.rates, options.lengths, options.warm):
            measured = Cell(target, *cell, options.seed)
            await measured.run(options.requests)
            print(measured.line(), flush=True)


if __name__ == "__main__":
    main()
