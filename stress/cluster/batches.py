"""A client that sends batches to a cluster whose parts fail, and checks every line's answer."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx

from stress.catalog import CHAT, Question, ask_undisturbed
from stress.compare import Violation
from stress.frames import said_in_body
from stress.oracle import same
from stress.story import RETRYABLE

# How many different questions the batches ask, and how often each batch asks them.
_NUM_QUESTIONS, _NUM_TIMES = 6, 3
_PAUSE_S = 0.5
# A batch only runs while no other request needs the engines, so it may take the whole run.
_LAST_BATCH_S = 600.0
_ENDED = ("completed", "failed", "expired", "cancelled")


class BatchClient:
    """Sends one batch after another until `finish`.

    `was_failover` returns whether Redis failed over after a time. A failover may lose what was
    stored last, so only then may a file or a batch have vanished: the client sends it again.
    """

    def __init__(self, url: str, seed: int, was_failover: Callable[[float], bool]) -> None:
        self.violations: list[Violation] = []
        self.num_lines = self.num_vanished = 0
        self._url = url
        self._seed = seed
        self._was_failover = was_failover
        self._is_over = False
        self._questions: dict[str, Question] = {}
        self._running: asyncio.Task[None]

    async def start(self) -> None:
        """Ask the questions alone, while nothing disturbs the cluster, and start the batches."""
        questions = await asyncio.to_thread(self._ask_alone)
        numbers = range(_NUM_QUESTIONS * _NUM_TIMES)
        self._questions = {f"line {i}": questions[i % _NUM_QUESTIONS] for i in numbers}
        self._running = asyncio.create_task(self._run(), name="batches")

    async def finish(self) -> None:
        """Wait for the end of the last batch. Idempotent."""
        self._is_over = True
        await asyncio.wait([self._running], timeout=_LAST_BATCH_S)
        if not self._running.done():
            self._fail("silent", f"the last batch did not end within {_LAST_BATCH_S:.0f} s")
            self._running.cancel()
        elif not self._running.cancelled():
            # Raise what ended the task early.
            self._running.result()

    def _ask_alone(self) -> list[Question]:
        with httpx.Client(base_url=self._url, timeout=300) as client:
            model = client.get("/v1/models").json()["data"][0]["id"]
            return [
                ask_undisturbed(client, CHAT, self._body(model, i)) for i in range(_NUM_QUESTIONS)
            ]

    def _body(self, model: str, number: int) -> dict[str, Any]:
        messages = [{"role": "user", "content": f"batch {self._seed}, question {number}"}]
        sampling = {"max_tokens": 30, "temperature": 0.8, "seed": number}
        return {"model": model, "messages": messages} | sampling

    async def _run(self) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=30) as client:
            while not self._is_over:
                began = time.monotonic()
                try:
                    await self._run_one(client)
                except _Refused as refused:
                    if refused.status == 404 and self._was_failover(began):
                        self.num_vanished += 1
                    else:
                        self._fail("lost", str(refused))

    async def _run_one(self, client: httpx.AsyncClient) -> None:
        lines = [
            {"custom_id": name, "method": "POST", "url": CHAT, "body": question.body}
            for name, question in self._questions.items()
        ]
        data = "".join(f"{json.dumps(line)}\n" for line in lines).encode()
        form = {"files": {"file": ("lines.jsonl", data)}, "data": {"purpose": "batch"}}
        file = (await _ask(client, "POST", "/v1/files", **form)).json()
        wanted = {"input_file_id": file["id"], "endpoint": CHAT, "completion_window": "24h"}
        batch = (await _ask(client, "POST", "/v1/batches", json=wanted)).json()
        while batch["status"] not in _ENDED:
            await asyncio.sleep(_PAUSE_S)
            batch = (await _ask(client, "GET", f"/v1/batches/{batch['id']}")).json()
        if batch["status"] != "completed":
            self._fail("lost", f"{batch['id']} is {batch['status']}: {batch}")
            return
        results = await _ask(client, "GET", f"/v1/files/{batch['output_file_id']}/content")
        self._check(batch["id"], [json.loads(line) for line in results.text.splitlines()])

    def _check(self, batch: str, results: list[dict[str, Any]]) -> None:
        times = Counter(it["custom_id"] for it in results)
        for name in self._questions:
            if times[name] != 1:
                kind = "repeated" if times[name] else "lost"
                self._fail(kind, f"{batch}: {name} was answered {times[name]} times")
        for it in results:
            answer, question = it["response"]["body"], self._questions[it["custom_id"]]
            where = f"{batch}, {it['custom_id']}"
            self.violations += same(said_in_body(answer), question.said, where)
        self.num_lines += len(results)

    def _fail(self, kind: str, what: str) -> None:
        self.violations.append(Violation(kind, 1, what))


class _Refused(Exception):
    """An answer that a repeated request would not change."""

    def __init__(self, made: httpx.Response) -> None:
        request = made.request
        super().__init__(f"{request.method} {request.url}: {made.status_code} {made.text[:300]}")
        self.status = made.status_code


async def _ask(client: httpx.AsyncClient, method: str, path: str, **more: Any) -> httpx.Response:
    """Repeat the request until an answer arrives. Raises _Refused unless its status is 200."""
    while True:
        try:
            made = await client.request(method, path, **more)
        except httpx.TransportError:
            pass
        else:
            if made.status_code == 200:
                return made
            if made.status_code not in RETRYABLE:
                raise _Refused(made)
        await asyncio.sleep(_PAUSE_S)
