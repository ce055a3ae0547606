"""What work that is no token costs the streams beside it: images of 40 megapixels, 2,048 inputs.

    python -m benchmarks.encode_stall embed [MODEL] [--rounds N]
    python -m benchmarks.encode_stall image MODEL [--rounds N]

One server. Rounds alone and rounds in which such requests come one after another alternate, so that
whatever else the machine does falls on both. Exits with 1 if the 99th percentile of the gaps beside
them is more than 1.5 times the server's stall target. MODEL: a folder, or headrace-mini to embed.
"""

import argparse
import asyncio
import base64
import io
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

from benchmarks.crowd import show
from benchmarks.grammar_stall import BOUND, NUM_STREAMS, ROUND_S, percentile, stream
from benchmarks.wall import serving

Ask = Callable[[httpx.AsyncClient, int], Awaitable[httpx.Response]]


async def embed(client: httpx.AsyncClient, number: int) -> httpx.Response:
    """The largest batch there is."""
    inputs = [f"{number} of a batch, {i} of its inputs" for i in range(2048)]
    return await client.post("/v1/embeddings", json={"input": inputs})


async def see(client: httpx.AsyncClient, number: int) -> httpx.Response:
    """An image of 40 megapixels that was not sent before."""
    url = await asyncio.to_thread(picture, number)
    parts = [
        {"type": "text", "text": "What?"},
        {"type": "image_url", "image_url": {"url": url}},
    ]
    body: dict[str, Any] = {"messages": [{"role": "user", "content": parts}], "max_tokens": 1}
    return await client.post("/v1/chat/completions", json=body)


def picture(number: int) -> str:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (8000, 5000), (number % 256, 90, 200)).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


async def play(client: httpx.AsyncClient, ask: Ask | None, took: list[float]) -> list[float]:
    """The gaps of one round."""
    gaps: list[float] = []
    until = time.perf_counter() + ROUND_S

    async def again(ask: Ask) -> None:
        while (begun := time.perf_counter()) < until:
            answer = await ask(client, len(took))
            assert answer.status_code == 200, answer.text
            took.append(time.perf_counter() - begun)

    others = [again(ask)] if ask else []
    await asyncio.gather(*others, *(stream(client, gaps, until) for _ in range(NUM_STREAMS)))
    return gaps


async def compare(url: str, ask: Ask, num_rounds: int) -> bool:
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        target = (await client.get("/props")).json()["max_stall_ms"]
        await play(client, None, [])  # the engine learns what its steps take
        alone: list[float] = []
        beside: list[float] = []
        took: list[float] = []
        for _ in range(num_rounds):
            alone += await play(client, None, [])
            beside += await play(client, ask, took)
    show("gaps alone", alone)
    show("gaps beside it", beside)
    show("each took", [1000 * seconds for seconds in took])
    ratio = percentile(beside, 0.99) / target
    print(f"p99 beside it is {ratio:.2f} of the target of {target} ms")
    return ratio <= BOUND


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=("embed", "image"))
    parser.add_argument("model", nargs="?", default="headrace-mini")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    with serving(given.model, ()) as url:
        ask = embed if given.kind == "embed" else see
        sys.exit(0 if asyncio.run(compare(url, ask, given.rounds)) else 1)


if __name__ == "__main__":
    main()
