"""How far two models on one machine disturb each other: gaps of one while the other is at work.

    python -m benchmarks.two_models [MODEL] [--rounds 5] [--seconds 8] [--streams 4]

One server has the model twice, under two names. In each round the streams of `b` are measured three
times, in an order that turns from round to round: beside two streams of `a` (the control), beside
those while `a`'s engine is killed and loads again, and beside them and a prompt of `a` that fills
its context. Printed are the gaps of `b` of all rounds together. The client shares the cores with
the server. Run it on a machine that has nothing else to do.
"""

import argparse
import asyncio
import itertools
import json
import os
import signal
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from benchmarks.grammar_stall import percentile
from benchmarks.wall import serving

TEXT = "/v1/completions"
ASKED = {"prompt": "Once", "max_tokens": -1, "ignore_eos": True, "stream": True}
SETTLE_S, LIMIT_S = 2.0, 120.0
Act = Callable[[httpx.AsyncClient], Awaitable[None]]


async def read(client: httpx.AsyncClient, model: str, until: float, body: dict[str, Any]) -> Any:
    """When each piece of text of one stream came, until that moment or its end."""
    times: list[float] = []
    try:
        async with asyncio.timeout_at(until):
            sent = {**ASKED, **body, "model": model}
            async with client.stream("POST", TEXT, json=sent) as answer:
                answer.raise_for_status()
                async for line in answer.aiter_lines():
                    if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["text"]:
                        times.append(time.perf_counter())
    except TimeoutError:
        pass
    return times


async def measured(url: str, num_streams: int, seconds: float, act: Act) -> list[float]:
    """Milliseconds between pieces of text of `b`, from the act on."""
    loop = asyncio.get_running_loop()
    until = loop.time() + SETTLE_S + seconds
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S, limits=limits) as client:
        reads = [
            asyncio.create_task(read(client, model, until, {"prompt": f"Story {n}"}))
            for model, num in (("a", 2), ("b", num_streams))
            for n in range(num)
        ]
        await asyncio.sleep(SETTLE_S)
        since = time.perf_counter()
        await act(client)
        all_times = (await asyncio.gather(*reads))[2:]
    found = []
    for times in all_times:
        later = [moment for moment in times if moment >= since]
        # a stream that fell silent for good counts with its silence
        later.append(since + seconds) if not later else None
        found += [1000 * (y - x) for x, y in itertools.pairwise([since, *later])]
    return found


async def nothing(client: httpx.AsyncClient) -> None:
    """The control."""


async def kill(client: httpx.AsyncClient) -> None:
    models = (await client.get("/manage/state")).json()["models"]
    (pid,) = (one["engine"]["pid"] for one in models if one["model"] == "a")
    os.kill(pid, signal.SIGKILL)


async def long_prompt(client: httpx.AsyncClient) -> None:
    entries = (await client.get("/models")).json()["data"]
    (length,) = (one["max_model_len"] for one in entries if one["id"] == "a")
    ids = list(range(5, 105)) * (length // 100 + 1)
    body = {"model": "a", "prompt": ids[: length - 8], "max_tokens": 1, "cache_prompt": False}
    (await client.post(TEXT, json=body)).raise_for_status()


async def ready(url: str) -> None:
    """Both are loaded."""
    async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as client:
        for model in "ab":
            body = {"model": model, "prompt": "a", "max_tokens": 1}
            (await client.post(TEXT, json=body)).raise_for_status()
        async with asyncio.timeout(LIMIT_S):
            while True:
                models = (await client.get("/manage/state")).json()["models"]
                if all(one["engine"]["state"] == "up" for one in models):
                    return
                await asyncio.sleep(0.2)


async def run(url: str, rounds: int, seconds: float, num_streams: int) -> None:
    acts = {"control": nothing, "engine of a killed": kill, "long prompt of a": long_prompt}
    gaps: dict[str, list[float]] = defaultdict(list)
    for number in range(rounds):
        names = list(acts)
        for name in names[number % 3 :] + names[: number % 3]:
            await ready(url)
            gaps[name] += await measured(url, num_streams, seconds, acts[name])
    control = percentile(gaps["control"], 0.99)
    print(f"gaps of {num_streams} streams of b, {rounds} rounds of {seconds:g} s, milliseconds")
    for name in acts:
        p50, p99 = (percentile(gaps[name], share) for share in (0.5, 0.99))
        print(
            f"{name:20} p50 {p50:7.1f}  p99 {p99:7.1f} ({p99 / control:.2f} x the control's)  "
            f"longest {max(gaps[name]):7.1f}  of {len(gaps[name])}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", default="headrace-mini")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--streams", type=int, default=4)
    options = parser.parse_args()
    with serving(options.model, ("--alias", "a", f"--model=b={options.model}")) as url:
        asyncio.run(run(url, options.rounds, options.seconds, options.streams))


if __name__ == "__main__":
    main()
