"""Follows a server's reports about its engine steps, if the server offers such reports."""

import asyncio
import contextlib
from statistics import median
from typing import Any

import httpx
import msgspec

from headrace.bench.record import Evidence
from headrace.bench.target import Target

_STATE, _STREAM = "/manage/state", "/manage/stream"
_IDLE_WITHIN_S = 60.0
_SETTLE_S = 1.0
_POLL_S = 0.05

State = dict[str, Any]


class Trace:
    """Owns the task that reads the reports. `state` is the latest report; None without reports."""

    def __init__(self, target: Target) -> None:
        self.state: State | None = None
        self._target = target
        self._steps: dict[int, State] = {}
        self._begun: State = {}
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        response = await self._target.http.get(_STATE)
        is_json = response.headers.get("content-type", "").startswith("application/json")
        if response.status_code != 200 or not is_json:
            return
        self.state = response.json()
        self._task = asyncio.create_task(self._follow(), name="trace")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def described(self) -> State:
        """Return the server's description of itself."""
        state = {k: v for k, v in (self.state or {}).items() if k != "steps"}
        return {"model": self._target.model, "max_model_len": self._target.max_model_len} | state

    async def idle(self) -> None:
        """Wait until the server is idle. Ask the server, because its reports may be late."""
        if self.state is None:
            await asyncio.sleep(_SETTLE_S)
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_IDLE_WITHIN_S):
                while True:
                    self._take((await self._target.http.get(_STATE)).json())
                    if not self.state["running"] and not self.state["waiting"]["requests"]:
                        return
                    await asyncio.sleep(_POLL_S)

    async def begin(self) -> None:
        """Wait until the server is idle, and then start counting evidence."""
        await self.idle()
        self._begun, self._steps = self.state or {}, {}

    def steps(self, kind: str) -> list[State]:
        return [step for step in self._steps.values() if step["kind"] == kind]

    def evidence(self, num_streams: int) -> Evidence | None:
        """Return the evidence counted since `begin`; None without reports."""
        if self.state is None:
            return None
        mixed = [s for s in self.steps("mixed") if s["decoding"] >= num_streams]
        ratios = [s["actual_ms"] / s["predicted_ms"] for s in mixed if s["predicted_ms"]]
        before = self._begun["missed"]
        missed = {k: n - before.get(k, 0) for k, n in self.state["missed"].items()}
        return Evidence(
            num_steps=self.state["num_steps"] - self._begun["num_steps"],
            num_seen=len(self._steps),
            num_mixed=len(mixed),
            num_starts=self.state["engine"]["starts"] - self._begun["engine"]["starts"],
            model_error=median(abs(ratio - 1) for ratio in ratios) if ratios else None,
            missed={cause: n for cause, n in missed.items() if n},
        )

    async def _follow(self) -> None:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                async with self._target.http.stream("GET", _STREAM) as response:
                    async for line in response.aiter_lines():
                        if line.startswith('data: {"'):
                            self._take(msgspec.json.decode(line[6:]))
            await asyncio.sleep(_POLL_S)

    def _take(self, state: State) -> None:
        self.state = state
        last, steps = state["num_steps"], state["steps"]
        since = self._begun.get("num_steps", 0)
        for number, step in enumerate(steps, last - len(steps) + 1):
            if number > since:
                self._steps[number] = step
