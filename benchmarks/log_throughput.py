"""What durable logs cost a busy server: tokens a second of 32 streams, durable against plain.

    python -m benchmarks.log_throughput MODEL

One server and model; rounds of durable streams (opted in by their name, committed to SQLite before
they are sent) and of plain ones (memory only) alternate, so that whatever else the machine does
falls on both. MODEL: a folder, or headrace-mini.

Rounds differ by more than a log costs, so the CPU time of the server's own process (streams, logs
and HTTP, without the engine's) is counted too: what durable streams add to it is the log, and as a
share of all cores it bounds what the log can take from the engine.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import httpx

from benchmarks.wall import serving

NUM_STREAMS = 32


async def read(client: httpx.AsyncClient, name: str, num_tokens: int) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": num_tokens, "ignore_eos": True}
    headers = {"X-Conversation-Id": name} if name else {}
    async with client.stream(
        "POST", "/v1/completions", json={**body, "stream": True}, headers=headers
    ) as response:
        response.raise_for_status()
        async for _ in response.aiter_raw():
            pass


class Round(NamedTuple):
    tokens_per_s: float
    cpu_share: float
    """Of all cores' time: what the server's process took, the engine's not counted."""


async def measure(client: httpx.AsyncClient, name: str, num_tokens: int) -> Round:
    """From the first request to the end of the last stream; no name: plain streams."""
    begun, cpu = time.perf_counter(), server_cpu_s()
    names = [f"{name} {number}" if name else "" for number in range(NUM_STREAMS)]
    await asyncio.gather(*(read(client, each, num_tokens) for each in names))
    seconds = time.perf_counter() - begun
    share = (server_cpu_s() - cpu) / seconds / (os.cpu_count() or 1)
    return Round(NUM_STREAMS * num_tokens / seconds, share)


def server_cpu_s() -> float:
    """CPU seconds of this process's one child, the server, so far (`man proc`: stat)."""
    pid = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()[0]
    after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")


async def compare(url: str, num_rounds: int, num_tokens: int) -> None:
    limits = httpx.Limits(max_connections=NUM_STREAMS)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        before = await measure(client, "", num_tokens)
        ratios, added = [], []
        for number in range(num_rounds):
            durable = await measure(client, f"round {number}", num_tokens)
            after = await measure(client, "", num_tokens)
            ratios.append(2 * durable.tokens_per_s / (before.tokens_per_s + after.tokens_per_s))
            added.append(durable.cpu_share - (before.cpu_share + after.cpu_share) / 2)
            print(f"plain {show(before)}; durable {show(durable)}; plain {show(after)}", flush=True)
            before = after
    print(f"durable / plain: median {statistics.median(ratios):.4f}, {min(ratios):.4f} to "
          f"{max(ratios):.4f} in {num_rounds} rounds")  # fmt: skip
    print(f"CPU that durable streams add: median {statistics.median(added):.2%} of all cores, "
          f"{min(added):.2%} to {max(added):.2%}")  # fmt: skip


def show(measured: Round) -> str:
    return f"{measured.tokens_per_s:.1f} tokens/s, {measured.cpu_share:.2%} CPU"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=200, help="per stream")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as state:
        flags = ("--state-dir", state, "--max-num-seqs", str(NUM_STREAMS))
        with serving(given.model, flags) as url:
            asyncio.run(compare(url, given.rounds, given.tokens))


if __name__ == "__main__":
    main()
