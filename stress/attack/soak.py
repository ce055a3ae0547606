"""Runs a busy server for minutes and then checks its counts.

`python -m stress.attack.soak --seconds 600`. The load consists of bursts that overfill a small
queue, stops, slow readers, bad bodies, cut connections, WebSockets and killed engines. Between
rounds the server is idle, and its memory and descriptors are measured. At the end, each accepted
request must have been answered exactly once. The totals of /metrics must equal the sums of all
usage.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from websockets.asyncio.client import connect

from stress.attack.honest import Scales
from stress.site import Site
from tools.harness.sse import data_of

TEXT = "/v1/completions"
FLAGS = ("--threads", "1", "--max-num-seqs", "6", "--max-num-queued-reqs", "16")
FLAGS += ("--heartbeat-s", "1", "--linger-s", "2", "--drain-s", "5")
ROUNDS = 3
NUM_BURST, KILL_EVERY_S, REST_S = 40, 20.0, 180.0
# Limits for the growth of the idle server from the second round to the last one: a number of
# descriptors, and for the memory a factor plus a number of bytes.
MAX_MORE_DESCRIPTORS, MAX_GROWTH, MAX_MORE_BYTES = 4, 1.15, 30e6
TERMINAL = ("finish", "error")


class Weight(NamedTuple):
    """The resources that the server uses while it is idle."""

    num_bytes: float
    num_descriptors: int
    num_threads: int


class Books:
    """Counts the accepted requests and the tokens of each stream, and collects the problems."""

    def __init__(self) -> None:
        # Prompt tokens by stream id.
        self.prompt_tokens: dict[str, int] = {}
        self.tokens: dict[str, int] = {}
        # Terminal events by stream id; each stream must have one.
        self.ends: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()
        self.outcomes: Counter[str] = Counter()
        self.problems: list[str] = []

    def answered(self, response: httpx.Response) -> bool:
        """Counts an answer, and returns whether the request was accepted."""
        status = response.status_code
        self.statuses[status] += 1
        if status >= 500:
            self.problems.append(f"{status} to {response.request.url.path}")
        if status == 429 and "retry-after-ms" not in response.headers:
            self.problems.append("429 without retry-after-ms")
        return status == 200

    def ended(self, stream: str, prompt: int, generated: int, outcome: str) -> None:
        self.ends[stream] += 1
        self.prompt_tokens[stream], self.tokens[stream] = prompt, generated
        self.outcomes[outcome] += 1


class Soak:
    """All clients of one server."""

    def __init__(self, site: Site, seed: int) -> None:
        self.books = Books()
        self.weights: list[Weight] = []
        self._site = site
        self._random = random.Random(seed)
        self._number = 0
        self._scales = Scales(site)
        self._url = f"http://127.0.0.1:{site.port}"
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._client = httpx.AsyncClient(base_url=self._url, timeout=300, limits=limits)
        self._until = 0.0

    async def run(self, seconds: float) -> None:
        clients = (self._bursts, self._stops, self._slow, self._bad, self._cuts, self._sockets)
        for number in range(ROUNDS):
            self._until = time.monotonic() + seconds / ROUNDS
            async with asyncio.TaskGroup() as tasks:
                for client in clients:
                    tasks.create_task(self._again(client))
                killing = tasks.create_task(self._again(self._kills))
                await asyncio.sleep(seconds / ROUNDS)
                killing.cancel()
            await self._rest()
            self.weights.append(await asyncio.to_thread(self._weigh))
            print(
                f"round {number + 1}: {self.weights[-1]}, {len(self.books.ends)} streams",
                flush=True,
            )
        await self._close_books()
        await self._client.aclose()

    async def _again(self, client: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while time.monotonic() < self._until:
            try:
                await client()
            except Exception as error:
                self.books.problems.append(f"{client.__name__}: {error!r}")
                await asyncio.sleep(1.0)

    async def _rest(self) -> None:
        deadline = time.monotonic() + REST_S
        while time.monotonic() < deadline:
            if await self._site.is_well(REST_S):
                state = (await self._client.get("/manage/state")).json()
                if not state["running"] and not state["waiting"]["requests"]:
                    # In this time, disconnected requests are stopped and idle connections are
                    # closed.
                    await asyncio.sleep(3.0)
                    return
            await asyncio.sleep(0.2)
        self.books.problems.append("the server did not become idle")

    def _weigh(self) -> Weight:
        process = Path(f"/proc/{self._site.pid}")
        num_threads = len(os.listdir(process / "task"))
        return Weight(self._scales.weigh(), len(os.listdir(process / "fd")), num_threads)

    # The clients.

    def _body(self, num_tokens: int, **more: Any) -> dict[str, Any]:
        self._number += 1
        dice = self._random
        prompt = f"{self._number} " + "word " * dice.choice((1, 5, 40, 300))
        temperature = dice.choice((0, 1))
        return {"prompt": prompt, "max_tokens": num_tokens, "temperature": temperature} | more

    def _key(self) -> dict[str, str]:
        self._number += 1
        return {"Idempotency-Key": f"soak-{self._number}"}

    async def _bursts(self) -> None:
        """Sends more requests at a time than the queue holds, and reads each answer to its end."""

        async def one() -> None:
            answer = await self._client.post(TEXT, json=self._body(self._random.randint(1, 30)))
            if self.books.answered(answer):
                usage = answer.json()["usage"]
                self.books.ended(
                    answer.headers["x-stream-id"],
                    usage["prompt_tokens"],
                    usage["completion_tokens"],
                    "whole",
                )

        await asyncio.gather(*(one() for _ in range(NUM_BURST)))
        await asyncio.sleep(self._random.uniform(1.0, 4.0))

    async def _slow(self) -> None:
        """Reads a streamed answer slowly."""
        body = self._body(60, stream=True, stream_options={"include_usage": True})
        async with self._client.stream("POST", TEXT, json=body) as answer:
            if not self.books.answered(answer):
                await answer.aread()
                await asyncio.sleep(1.0)
                return
            usage, is_done = None, False
            async for line in answer.aiter_lines():
                await asyncio.sleep(self._random.choice((0, 0, 0.05)))
                is_done |= line == "data: [DONE]"
                for frame in data_of([line]):
                    usage = frame.get("usage") or usage
            if not (usage and is_done):
                self.books.problems.append("a slow reader's answer is incomplete")
                return
            stream = answer.headers["x-stream-id"]
            used = usage["prompt_tokens"], usage["completion_tokens"]
            self.books.ended(stream, *used, "slow")

    async def _bad(self) -> None:
        """Sends invalid requests, each of which must be refused."""
        dice = self._random
        bodies = (b"", b"{", b"[]", b'{"prompt": 5}', b"\xff\xfe", b'{"prompt":"x","n":0}',
                  b"[" * 3000, b'{"prompt":[]}', b'{"prompt":"x","model":"none"}',
                  bytes(dice.randrange(256) for _ in range(dice.randrange(2000))))  # fmt: skip
        headers = {"Content-Type": "application/json"}
        for body in bodies:
            answer = await self._client.post(TEXT, content=body, headers=headers)
            if self.books.answered(answer):
                self.books.problems.append(f"accepted: {body[:60]!r}")
        await asyncio.sleep(0.5)

    @contextlib.asynccontextmanager
    async def _opened(self, num_tokens: int) -> AsyncIterator[httpx.Response | None]:
        """Opens a durable stream; yields its response, or None if the request was refused."""
        body = self._body(num_tokens, stream=True, ignore_eos=True)
        async with self._client.stream("POST", TEXT, json=body, headers=self._key()) as answer:
            if self.books.answered(answer):
                yield answer
            else:
                yield None
                await asyncio.sleep(1.0)

    async def _take(self, answer: httpx.Response, num_lines: int) -> None:
        async for _ in answer.aiter_lines():
            num_lines -= 1
            if num_lines <= 0:
                return

    async def _stops(self) -> None:
        async with self._opened(400) as answer:
            if answer is None:
                return
            stream = answer.headers["x-stream-id"]
            await self._take(answer, self._random.randrange(40))
            for _ in range(2):
                stopped = await self._client.post(f"/v1/streams/{stream}/cancel")
                self.books.answered(stopped)
        await self._read_to_the_end(stream)

    async def _cuts(self) -> None:
        """Disconnects during an answer, again and again, and resumes from the last cursor."""
        async with self._opened(80) as answer:
            if answer is None:
                return
            stream = answer.headers["x-stream-id"]
            await self._take(answer, self._random.randrange(30))
        await self._read_to_the_end(stream, cuts=3)

    async def _read_to_the_end(self, stream: str, cuts: int = 0) -> None:
        """Reads every event once, and counts the stream's tokens."""
        prompt = generated = 0
        last, event = -1, {"kind": ""}
        while event["kind"] not in TERMINAL:
            num_left = self._random.randrange(1, 60) if cuts > 0 else -1
            cuts -= 1
            path = f"/v1/streams/{stream}/events"
            after = {"after": str(last)} if last >= 0 else {}
            async with self._client.stream("GET", path, params=after) as events:
                if not self.books.answered(events):
                    raise AssertionError(f"{events.status_code} for the events of a stream")
                async for line in events.aiter_lines():
                    if not line.startswith("data: ") or '"seq":' not in line:
                        continue
                    event = json.loads(line[6:])
                    if event["seq"] != last + 1:
                        self.books.problems.append(f"event {event['seq']} after {last}")
                    last = event["seq"]
                    prompt += event.get("prompt_tokens", 0) if event["kind"] == "accepted" else 0
                    generated += len(event.get("ids", ()))
                    num_left -= 1
                    if num_left == 0:
                        break
        outcome = event.get("code", "finish")
        if outcome not in ("finish", "cancelled"):
            self.books.problems.append(f"a stream ended in {outcome}")
        self.books.ended(stream, prompt, generated, outcome)

    async def _sockets(self) -> None:
        """Sends several requests on one WebSocket, stops or detaches some, and closes it."""
        address = self._url.replace("http", "ws") + "/v1/realtime-text"
        streams: dict[str, str] = {}
        refused: set[str] = set()
        async with connect(address, compression=None) as socket:
            for number in range(6):
                key = self._key()["Idempotency-Key"]
                body = self._body(60, ignore_eos=True)
                request = {"type": "request", "id": str(number), "route": TEXT, "body": body}
                await socket.send(json.dumps({**request, "idempotency_key": key}))
            await socket.send("{")
            while len(streams) + len(refused) < 6:
                frame = json.loads(await asyncio.wait_for(socket.recv(), 300))
                if frame["type"] == "error" and frame["id"] is not None:
                    refused.add(frame["id"])
                    self.books.statuses[frame["error"]["status"]] += 1
                    if frame["error"]["status"] != 429:
                        self.books.problems.append(f"a socket's request: {frame['error']}")
                elif frame["type"] == "response" and frame["id"] not in streams:
                    streams[frame["id"]] = frame["stream"]
                    self.books.statuses[200] += 1
            await socket.send(json.dumps({"type": "notification", "stop": "1"}))
            await socket.send(json.dumps({"type": "notification", "detach": "2"}))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._random.uniform(0, 2)):
                    while True:
                        await socket.recv()
        await asyncio.gather(*(self._read_to_the_end(stream) for stream in streams.values()))

    async def _kills(self) -> None:
        await asyncio.sleep(self._random.uniform(0.3, 1.0) * KILL_EVERY_S)
        if time.monotonic() < self._until and self._site.kill_engine():
            self.books.outcomes["engine kills"] += 1

    # The final comparison of all counts.

    async def _close_books(self) -> None:
        books = self.books
        more = [stream for stream, number in books.ends.items() if number != 1]
        if more:
            books.problems.append(f"{len(more)} streams ended more than once")
        told = {
            "requests": len(books.ends),
            "prompt_tokens": sum(books.prompt_tokens.values()),
            "generated_tokens": sum(books.tokens.values()),
        }
        metrics = (await self._client.get("/metrics")).text
        for name, number in told.items():
            lines = [it for it in metrics.splitlines() if it.startswith(f"headrace_{name}_total")]
            counted = sum(float(line.rpartition(" ")[2]) for line in lines)
            if counted != number:
                books.problems.append(
                    f"{name}: clients counted {number}, /metrics says {counted:g}"
                )
        print(f"counted by clients: {told}")
        first, last = self.weights[1 if len(self.weights) > 2 else 0], self.weights[-1]
        if last.num_descriptors > first.num_descriptors + MAX_MORE_DESCRIPTORS:
            books.problems.append(f"descriptors: {first.num_descriptors}, {last.num_descriptors}")
        if last.num_bytes > MAX_GROWTH * first.num_bytes + MAX_MORE_BYTES:
            books.problems.append(f"bytes: {first.num_bytes:.0f}, then {last.num_bytes:.0f}")


async def soak(folder: Path, seconds: float, seed: int) -> list[str]:
    """Runs all clients against one server for `seconds`, and returns the problems found."""
    site = Site("headrace-mini", folder, FLAGS)
    site.start()
    try:
        assert await site.ready(), site.last_lines
        run = Soak(site, seed)
        await run.run(seconds)
        code = await site.stop()
        problems = run.books.problems + [f"in the log: {it}" for it in site.complaints]
        if code != 0:
            problems.append(f"after SIGTERM the server exited with code {code}")
        print(f"answers by status: {dict(run.books.statuses)}")
        print(f"streams by outcome: {dict(run.books.outcomes)}")
        return problems
    finally:
        site.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="stress.attack.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headrace-soak-") as name:
        problems = asyncio.run(soak(Path(name) / "state", options.seconds, options.seed))
    for problem, number in Counter(problems).most_common(30):
        print(f"VIOLATION ({number}) {problem}")
    print(f"{len(problems)} violations in {options.seconds:g} s, seed {options.seed}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
