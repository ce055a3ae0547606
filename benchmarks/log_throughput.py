"""What durable logs cost a busy server: tokens a second of 32 streams, durable against plain.

    python -m benchmarks.log_throughput MODEL

One server and model; rounds of durable streams (opted in by their name, committed to SQLite before
they are sent) and of plain ones (memory only) alternate, so that whatever else the machine does
falls on both. MODEL: a folder, or headrace-mini.
"""

import argparse
import asyncio
import statistics
import tempfile
import time

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


async def throughput(client: httpx.AsyncClient, name: str, num_tokens: int) -> float:
    """Tokens a second, from the first request to the end of the last stream."""
    begun = time.perf_counter()
    names = [f"{name} {number}" if name else "" for number in range(NUM_STREAMS)]
    await asyncio.gather(*(read(client, each, num_tokens) for each in names))
    return NUM_STREAMS * num_tokens / (time.perf_counter() - begun)


async def compare(url: str, num_rounds: int, num_tokens: int) -> None:
    limits = httpx.Limits(max_connections=NUM_STREAMS)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        before = await throughput(client, "", num_tokens)
        ratios = []
        for number in range(num_rounds):
            durable = await throughput(client, f"round {number}", num_tokens)
            after = await throughput(client, "", num_tokens)
            ratios.append(2 * durable / (before + after))
            print(
                f"plain {before:.1f}, durable {durable:.1f}, plain {after:.1f} tokens/s", flush=True
            )
            before = after
    print(f"durable / plain: median {statistics.median(ratios):.4f}, {min(ratios):.4f} to "
          f"{max(ratios):.4f} in {num_rounds} rounds")  # fmt: skip


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
