"""What a crowd costs: heartbeats of 1,000 waiting streams, control routes, and neighbours' frames.

    python -m benchmarks.crowd [MODEL] [--waiting 1000] [--active 200] [--seconds 30]

One server, whose engine takes all cores. First `--active` streams are generated while `--waiting`
more wait for a place and hear heartbeats once a second: printed is how late those are, and how long
control routes take. Then eight streams are generated alone, and beside one client that sends the
largest of what is allowed, in turn: printed is how much later their frames come. One process reads
all streams and shares the cores with the server, so its own delay is in every figure.
"""

import argparse
import asyncio
import itertools
import json
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any
from urllib.parse import urlsplit

import httpx

from benchmarks.grammar_stall import percentile
from benchmarks.wall import serving

TEXT = "/v1/completions"
HEARTBEAT_S = 1.0
NUM_NEIGHBOURS, ROUND_S = 8, 6.0
ASKED = {"prompt": "Once", "max_tokens": -1, "ignore_eos": True, "stream": True}
CONTROLS = ("/health", "/v1/models", "/metrics", "/manage/state", "/slots")


class Line:
    """One stream, read as it comes; `times` are when something came."""

    def __init__(self, url: str) -> None:
        self._host = urlsplit(url)
        self.times: list[float] = []

    async def read(self, until: float, body: dict[str, Any]) -> None:
        host, port = self._host.hostname, self._host.port
        reader, writer = await asyncio.open_connection(host, port)
        sent = json.dumps(body).encode()
        head = f"POST {TEXT} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
        writer.write(head.encode() + b"Content-Length: %d\r\n\r\n" % len(sent) + sent)
        try:
            async with asyncio.timeout_at(until):
                first = await reader.readline()
                assert b" 200 " in first, first
                while await reader.read(65536):
                    self.times.append(time.perf_counter())
        except TimeoutError:
            pass
        finally:
            writer.transport.abort()

    def gaps(self, since: float) -> list[float]:
        """Milliseconds between signs of life from `since` on."""
        times = [moment for moment in self.times if moment >= since]
        return [1000 * (b - a) for a, b in itertools.pairwise(times)]


def controls(url: str, seconds: float) -> dict[str, list[float]]:
    """Milliseconds that each route took, one request at a time."""
    took: dict[str, list[float]] = {route: [] for route in CONTROLS}
    until = time.perf_counter() + seconds
    with httpx.Client(base_url=url, timeout=60) as client:
        while time.perf_counter() < until:
            for route in CONTROLS:
                begun = time.perf_counter()
                client.get(route).raise_for_status()
                took[route].append(1000 * (time.perf_counter() - begun))
                time.sleep(0.02)
    return took


async def crowd(url: str, num_active: int, num_waiting: int, seconds: float) -> None:
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds + 20
    lines = [Line(url) for _ in range(num_active + num_waiting)]
    async with httpx.AsyncClient(base_url=url, timeout=60) as client, asyncio.TaskGroup() as tasks:
        for line in lines:
            tasks.create_task(line.read(until, ASKED))
            await asyncio.sleep(0.005)
        await asyncio.sleep(10)  # until all are in, and the engine knows its steps
        since = time.perf_counter()
        with ProcessPoolExecutor(1, get_context("spawn")) as other:  # does not wait for our streams
            took = await loop.run_in_executor(other, controls, url, seconds)
        state = (await client.get("/manage/state")).json()
    print(f"{state['running']} streams run, {state['waiting']['requests']} wait")
    late = [gap - 1000 * HEARTBEAT_S for line in lines[num_active:] for gap in line.gaps(since)]
    late = [max(gap, 0.0) for gap in late]
    show("heartbeats of those that wait come late by", late)
    show("gaps of those that run", [g for line in lines[:num_active] for g in line.gaps(since)])
    show("control routes", [value for values in took.values() for value in values])
    for route, values in took.items():
        show(f"  GET {route}", values)


def show(what: str, values: list[float]) -> None:
    if not values:
        print(f"{what}: nothing came")
        return
    half, most = percentile(values, 0.5), percentile(values, 0.99)
    print(f"{what}: median {half:.1f}, p99 {most:.1f}, worst {max(values):.1f} ms ({len(values)})")


async def beside(url: str, heavy: Callable[[], Awaitable[Any]] | None) -> list[float]:
    """Gaps of eight streams, beside requests of one kind after another."""
    loop = asyncio.get_running_loop()
    until = loop.time() + ROUND_S
    lines = [Line(url) for _ in range(NUM_NEIGHBOURS)]
    since = time.perf_counter() + 0.5

    async def again() -> None:
        await asyncio.sleep(0.5)
        while heavy and loop.time() < until:
            await heavy()

    await asyncio.gather(again(), *(line.read(until, ASKED) for line in lines))
    return [gap for line in lines for gap in line.gaps(since)]


async def heaviest(url: str, num_rounds: int) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=120) as client:
        largest = json.dumps({"prompt": "x" * (32 * 2**20 - 100), "max_tokens": 1}).encode()
        many = {"prompt": ["Hi"] * 1024, "max_tokens": 1}
        names = {"conversation_ids": [f"c{i}" for i in range(1000)]}
        typed = {"Content-Type": "application/json"}
        for name in names["conversation_ids"]:
            body = {"prompt": "Hi", "max_tokens": 1, "stream": True}
            await client.post(TEXT, json=body, headers={"X-Conversation-Id": name})
        kinds: dict[str, Callable[[], Awaitable[Any]]] = {
            "a body of 32 MiB": lambda: client.post(TEXT, content=largest, headers=typed),
            "1,024 prompts": lambda: client.post(TEXT, json=many),
            "1,000 conversations looked up": lambda: client.post("/v1/streams/lookup", json=names),
        }
        for name, heavy in kinds.items():
            print(f"{name}: answered with {(await heavy()).status_code}")  # type: ignore[attr-defined]
            alone, loaded = [], []
            for _ in range(num_rounds):
                alone += await beside(url, None)
                loaded += await beside(url, heavy)
            show("  gaps alone", alone)
            show("  gaps beside it", loaded)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="headrace-mini")
    parser.add_argument("--waiting", type=int, default=1000)
    parser.add_argument("--active", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--rounds", type=int, default=2)
    given = parser.parse_args()
    flags = ("--max-num-seqs", str(given.active), "--max-num-queued-reqs", "2000")
    with serving(given.model, (*flags, "--heartbeat-s", str(HEARTBEAT_S))) as url:
        asyncio.run(crowd(url, given.active, given.waiting, given.seconds))
    with serving(given.model, ("--max-num-queued-reqs", "2000")) as url:
        asyncio.run(heaviest(url, given.rounds))


if __name__ == "__main__":
    main()
