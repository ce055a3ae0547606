"""Gaps and times to first token of streams, with a batch at work beside them and without.

    python -m benchmarks.batches [MODEL] [--pairs 10] [--clients 2] [--requests 3] [--length 400]

Rounds with and without a batch alternate on one server, and every other pair begins with the other
kind. In a round each client asks for one stream after the other, with a pause between, in which
the batch has the server to itself. Prompts are random ids, the same in both rounds of a pair, and
none is credited with what is cached: the streams of a pair have the same tokens. Prints the 99th
percentile and the median of both, of all rounds together and as the median of the pairs' ratios,
and how many lines were answered meanwhile. Exits with 1 if either 99th percentile is more than
1.1 times that without. Flags that are not known here are the server's.
"""

import argparse
import asyncio
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
from typing import Any, NamedTuple

import httpx

from tools.harness.servers import running_server

BOUND = 1.1
PAUSE_S = 0.4
LINES, LINE_TOKENS = 1000, 64


class Seen(NamedTuple):
    """One round: seconds to first tokens, and between tokens."""

    firsts: list[float]
    gaps: list[float]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="headrace-mini")
    for name, default in (("pairs", 10), ("clients", 2), ("requests", 3), ("length", 400)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--tokens", type=int, default=48)
    given, flags = parser.parse_known_args()
    state = tempfile.mkdtemp(prefix="headrace-batches-")
    with running_server(given.model, "--state-dir", state, *flags) as server:
        return asyncio.run(compare(server.url, given))


async def compare(url: str, given: argparse.Namespace) -> int:
    alone, beside = list[Seen](), list[Seen]()
    async with httpx.AsyncClient(base_url=url, timeout=300) as http:
        await one_round(http, given, 0)  # the engine learns what its steps take
        for number in range(given.pairs):
            for is_beside in (False, True) if number % 2 else (True, False):
                batch = await begun(http) if is_beside else None
                seen = await one_round(http, given, number + 1)
                (beside if is_beside else alone).append(seen)
                if batch is not None:
                    print(f"pair {number + 1}: {await stopped(http, batch)} lines", flush=True)
    ratios = [
        report("time to first token", [it.firsts for it in alone], [it.firsts for it in beside]),
        report("gaps", [it.gaps for it in alone], [it.gaps for it in beside]),
    ]
    return 0 if max(ratios) <= BOUND else 1


async def one_round(http: httpx.AsyncClient, given: argparse.Namespace, seed: int) -> Seen:
    seen = Seen([], [])
    async with asyncio.TaskGroup() as tasks:
        for number in range(given.clients):
            ids = random.Random(f"{seed} {number}")
            lag_s = PAUSE_S * number / given.clients
            tasks.create_task(client(http, given, seen, ids, lag_s))
    return seen


async def client(
    http: httpx.AsyncClient, given: argparse.Namespace, seen: Seen, ids: random.Random, lag_s: float
) -> None:
    await asyncio.sleep(lag_s)
    for _ in range(given.requests):
        await asyncio.sleep(PAUSE_S)
        body = {
            "prompt": [ids.randrange(10, 200) for _ in range(given.length)],
            "max_tokens": given.tokens,
            "ignore_eos": True,
            "stream": True,
            "temperature": 0,
            "cache_prompt": False,
        }
        times = [time.perf_counter()]
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {") and json.loads(line[6:])["choices"][0]["text"]:
                    times.append(time.perf_counter())
        waits = [after - before for before, after in itertools.pairwise(times)]
        seen.firsts.append(waits[0])
        seen.gaps.extend(waits[1:])


async def begun(http: httpx.AsyncClient) -> str:
    """A batch that is at work."""
    lines = []
    for number in range(LINES):
        body = {
            "prompt": f"{random.random()} of {number}: ",
            "max_tokens": LINE_TOKENS,
            "ignore_eos": True,
        }
        wish = {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
        lines.append(json.dumps(wish))
    files = {"file": ("lines.jsonl", "\n".join(lines))}
    file = await ask(http, "POST", "/v1/files", data={"purpose": "batch"}, files=files)
    wish = {"endpoint": "/v1/completions", "completion_window": "24h", "input_file_id": file["id"]}
    batch = await ask(http, "POST", "/v1/batches", json=wish)
    await at(http, batch["id"], "in_progress")
    await asyncio.sleep(1)
    return str(batch["id"])


async def stopped(http: httpx.AsyncClient, id: str) -> int:
    """The lines that were answered; returns once none is at work."""
    await ask(http, "POST", f"/v1/batches/{id}/cancel")
    return int((await at(http, id, "cancelled"))["request_counts"]["completed"])


async def at(http: httpx.AsyncClient, id: str, status: str) -> dict[str, Any]:
    """The batch, once it has come to this status."""
    while True:
        batch = await ask(http, "GET", f"/v1/batches/{id}")
        if batch["status"] == status:
            return batch
        await asyncio.sleep(0.1)


async def ask(http: httpx.AsyncClient, method: str, path: str, **sent: Any) -> dict[str, Any]:
    answer = await http.request(method, path, **sent)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def report(what: str, alone: list[list[float]], beside: list[list[float]]) -> float:
    """Prints both; returns the ratio of the 99th percentiles of all rounds."""
    figures = []
    for name, rounds in (("alone", alone), ("beside a batch", beside)):
        every = [value for found in rounds for value in found]
        p50, p99 = statistics.median(every), percentile(every, 99)
        figures.append(p99)
        print(f"{what} {name}: p50 {p50 * 1e3:.1f} ms, p99 {p99 * 1e3:.1f} ms, n {len(every)}")
    pairs = zip(alone, beside, strict=True)
    ratios = [percentile(b, 99) / percentile(a, 99) for a, b in pairs]
    spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    print(f"{what}: p99 is {figures[1] / figures[0]:.2f} of that alone; of pairs {spread}")
    return figures[1] / figures[0]


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share / 100))]


if __name__ == "__main__":
    sys.exit(main())
