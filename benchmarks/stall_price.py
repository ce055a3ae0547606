"""Measures what the default stall target costs, compared with `--max-stall-ms off`.

    python -m benchmarks.stall_price MODEL [--pairs 7] [--loads burst-4 burst-16 cold warm]

Both servers stay running, and one is measured at a time. The client runs on the same cores.

- burst-4 and burst-16: 4 or 16 requests arrive at once, each with 128 prompt tokens and 48 answer
  tokens.
- cold: a prompt of 2,048 tokens arrives while four streams run.
- warm: the same with a prompt of 7,780 tokens, of which 7,000 are cached.
"""

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from itertools import pairwise
from statistics import mean, median
from typing import NamedTuple

from headrace.bench.load import Background, PromptSource
from headrace.bench.target import Target
from tools.harness.servers import running_server

NUM_STREAMS, SHORT, ANSWER = 4, 128, 48
COLD, CACHED, NEW = 2048, 7000, 780
# Let the server end the cancelled streams before the next measurement.
PAUSE_S = 1.5


class Times(NamedTuple):
    """The times of one load, in seconds."""

    # Until the last answer has ended (bursts), or until the prompt's first token.
    whole_s: float
    # The mean time until the first token.
    first_s: float
    # The 99th percentile of the gaps between the streams' tokens; 0 for bursts.
    gap_s: float = 0.0


Load = Callable[[Target], Awaitable[Times]]


async def burst(target: Target, prompts: PromptSource, count: int) -> Times:
    """Send `count` short requests at once."""

    async def ask(prompt: list[int]) -> float:
        times = [at async for at in target.tokens(prompt, ANSWER)]
        return times[0]

    began = time.perf_counter()
    firsts = await asyncio.gather(*(ask(prompts.fresh(SHORT)) for _ in range(count)))
    return Times(time.perf_counter() - began, mean(firsts) - began)


async def beside_streams(target: Target, prompts: PromptSource, prompt: list[int]) -> Times:
    """Send a prompt while streams run."""
    streams = Background(target, [prompts.fresh(SHORT) for _ in range(NUM_STREAMS)])
    await streams.open()
    began = time.perf_counter()
    first = await target.first_token(prompt)
    await streams.close()
    gaps = sorted(
        later - earlier
        for times in streams.arrivals
        for earlier, later in pairwise(times)
        if later >= began and earlier <= first
    )
    await asyncio.sleep(PAUSE_S)
    return Times(first - began, first - began, gaps[int(0.99 * (len(gaps) - 1))])


def loads(prompts: PromptSource, cached: list[int]) -> dict[str, Load]:
    return {
        "burst-4": lambda target: burst(target, prompts, 4),
        "burst-16": lambda target: burst(target, prompts, 16),
        "cold": lambda target: beside_streams(target, prompts, prompts.fresh(COLD)),
        "warm": lambda target: beside_streams(target, prompts, cached + prompts.fresh(NEW)),
    }


def spread(values: Sequence[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


async def measure(urls: dict[str, str], names: list[str], num_pairs: int) -> None:
    """Measure each load `num_pairs` times on both servers, after one warm-up round."""
    targets = {name: Target(url, "", "stall-price") for name, url in urls.items()}
    for target in targets.values():
        await target.learn_model()
    prompts = PromptSource(0, targets["off"].num_vocab)
    cached = prompts.fresh(CACHED)
    for name in names:
        load = loads(prompts, cached)[name]
        if name == "warm":
            for target in targets.values():
                await target.first_token(cached)
        pairs = []
        for i in range(num_pairs + 1):
            order = sorted(targets, reverse=bool(i % 2))
            pairs.append({server: await load(targets[server]) for server in order})
            print(json.dumps({"load": name, "pair": i} | pairs[-1]), flush=True)
        default, off = ([pair[server] for pair in pairs[1:]] for server in ("default", "off"))
        whole = [a.whole_s / b.whole_s for a, b in zip(default, off, strict=True)]
        first = [a.first_s / b.first_s for a, b in zip(default, off, strict=True)]
        print(
            f"{name}: time {spread(whole)}, first token {spread(first)}; p99 gap "
            f"{median(a.gap_s for a in default):.2f} s, off {median(b.gap_s for b in off):.2f} s",
            flush=True,
        )


def main() -> None:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--loads", nargs="+", default=["burst-4", "burst-16", "cold", "warm"])
    args = parser.parse_args()
    settings: dict[str, tuple[str, ...]] = {"default": (), "off": ("--max-stall-ms", "off")}
    with ExitStack() as servers:
        urls = {
            name: servers.enter_context(
                running_server(args.model, "--state-dir", "none", *flags)
            ).url
            for name, flags in settings.items()
        }
        asyncio.run(measure(urls, args.loads, args.pairs))


if __name__ == "__main__":
    main()
