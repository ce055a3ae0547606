"""What a large schema costs the streams beside it: gaps between the tokens of four of them.

    python -m benchmarks.grammar_stall [MODEL] [--rounds N]

One server. Rounds alone and rounds in which requests with a schema of about a second come one after
another alternate, so that whatever else the machine does falls on both. Each schema is a new one,
so that none was compiled before. Exits with 1 if the 99th percentile of the gaps beside schemas is
more than 1.5 times the server's stall target. MODEL: a folder, or headrace-mini.
"""

import argparse
import asyncio
import json
import sys
import time
from typing import Any

import httpx

from benchmarks.wall import serving

NUM_STREAMS = 4
NUM_FIELDS = 2200  # close to the largest grammar that is taken
ROUND_S = 8.0
BOUND = 1.5


def schema(number: int) -> dict[str, Any]:
    fields = {
        f"f{number}_{i}": {"enum": [f"{j} of {i}" for j in range(4)]} for i in range(NUM_FIELDS)
    }
    required = {"required": list(fields), "additionalProperties": False}
    return {"type": "object", "properties": fields} | required


async def stream(client: httpx.AsyncClient, gaps: list[float], until: float) -> None:
    """Milliseconds between the tokens of one stream, which is left at `until`."""
    body = {"prompt": "Once", "max_tokens": -1, "ignore_eos": True, "stream": True, "seed": 1}
    last = 0.0
    async with client.stream(
        "POST", "/v1/completions", json=body | {"return_token_ids": True}
    ) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if time.perf_counter() > until:
                return
            choices = json.loads(line[6:])["choices"] if line.startswith("data: {") else []
            if any(choice.get("token_ids") for choice in choices):
                now = time.perf_counter()
                gaps += [1000 * (now - last)] if last else []
                last = now


async def constrain(client: httpx.AsyncClient, took: list[float], until: float) -> None:
    """Requests for one token each, and the seconds that each took."""
    while (begun := time.perf_counter()) < until:
        asked = {"prompt": "Hi", "max_tokens": 1, "guided_json": schema(len(took))}
        answer = await client.post("/v1/completions", json=asked)
        answer.raise_for_status()
        took.append(time.perf_counter() - begun)


async def play(client: httpx.AsyncClient, took: list[float] | None) -> list[float]:
    """The gaps of one round; beside schemas if `took` is given."""
    gaps: list[float] = []
    until = time.perf_counter() + ROUND_S
    work = [stream(client, gaps, until) for _ in range(NUM_STREAMS)]
    if took is not None:
        work.append(constrain(client, took, until))
    await asyncio.gather(*work)
    return gaps


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


async def compare(url: str, num_rounds: int) -> bool:
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        target = (await client.get("/props")).json()["max_stall_ms"]
        await play(client, None)  # the engine learns what its steps take
        alone: list[float] = []
        beside: list[float] = []
        took: list[float] = []
        for _ in range(num_rounds):
            alone += await play(client, None)
            beside += await play(client, took)
    shown = {"alone": alone, "beside schemas": beside}
    for name, gaps in shown.items():
        figures = (percentile(gaps, 0.5), percentile(gaps, 0.99), max(gaps))
        print(
            f"{name}: {len(gaps)} gaps, median {figures[0]:.1f}, p99 {figures[1]:.1f}, "
            f"largest {figures[2]:.1f} ms"
        )
    print(f"{len(took)} schemas, each answered in {percentile(took, 0.5):.2f} s (median)")
    ratio = percentile(beside, 0.99) / target
    print(f"p99 beside schemas is {ratio:.2f} of the target of {target} ms")
    return ratio <= BOUND


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="headrace-mini")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    with serving(given.model, ()) as url:
        sys.exit(0 if asyncio.run(compare(url, given.rounds)) else 1)


if __name__ == "__main__":
    main()
