"""Generates the load: background streams, and prompts that are sent on schedule meanwhile."""

import asyncio
import contextlib
import random
import time

import httpx

from headrace.bench.record import CellPlan, Injection, Round
from headrace.bench.target import ServerSaid, Target

_START_WITHIN_S = 300.0
# The number of tokens after which a stream counts as running.
_NUM_SETTLED = 4
_WARM_TAIL = 8


class PromptSource:
    """Makes prompts of random token ids, the same for every server. All prompts differ."""

    def __init__(self, seed: int, num_vocab: int, warm_share: float = 0.0) -> None:
        self._random = random.Random(seed)
        # Special tokens have the highest ids, so prompts use only the lower 90 % of the ids.
        self._num_plain = num_vocab * 9 // 10
        self._warm_share = warm_share
        self._begun: dict[int, list[int]] = {}

    def fresh(self, length: int) -> list[int]:
        return [self._random.randrange(self._num_plain) for _ in range(length)]

    def next(self, length: int) -> list[int]:
        """Return a new prompt or, for the fraction `warm_share`, an old prompt with a new end."""
        is_warm = self._random.random() < self._warm_share
        if is_warm and length in self._begun and length > _WARM_TAIL:
            return self._begun[length][:-_WARM_TAIL] + self.fresh(_WARM_TAIL)
        self._begun[length] = self.fresh(length)
        return self._begun[length]


class Background:
    """Streams that run until they are closed. `arrivals` has the token times of each stream."""

    def __init__(self, target: Target, prompts: list[list[int]]) -> None:
        self.arrivals: list[list[float]] = [[] for _ in prompts]
        self.lost_at: float | None = None
        self._target = target
        self._prompts = prompts
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        """Start the streams and return once all streams run. Raise ServerSaid if one fails."""
        self._tasks = [asyncio.create_task(self._run(i)) for i in range(len(self._prompts))]
        deadline = time.perf_counter() + _START_WITHIN_S
        while not all(len(times) >= _NUM_SETTLED for times in self.arrivals):
            for task in self._tasks:
                if task.done():
                    task.result()
                    raise ServerSaid(f"A stream ended before its token {_NUM_SETTLED}.")
            if time.perf_counter() > deadline:
                raise ServerSaid("The streams did not start; does the server run that many?")
            await asyncio.sleep(0.01)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _run(self, number: int) -> None:
        prompt = self._prompts[number]
        room = self._target.max_model_len - len(prompt)
        try:
            async for at in self._target.tokens(prompt, room):
                self.arrivals[number].append(at)
        finally:
            if not _is_cancelled():
                self.lost_at = self.lost_at or time.perf_counter()


class Injector:
    """Sends prompts on schedule, even while earlier prompts are unanswered (open loop)."""

    def __init__(
        self, target: Target, prompts: PromptSource, plan: CellPlan, patience_s: float
    ) -> None:
        self._target = target
        self._prompts = prompts
        self._plan = plan
        self._patience_s = patience_s

    async def send(self, first: int, num: int) -> list[Injection]:
        """Send `num` prompts of the cell, starting with number `first`.

        Times are from time.perf_counter.
        """
        prompts = [self._prompts.next(self._plan.prompt_tokens) for _ in range(num)]
        began = time.perf_counter()
        tasks = []
        for i, prompt in enumerate(prompts):
            await asyncio.sleep(began + i * self._plan.interval_s - time.perf_counter())
            is_warm_up = first + i < self._plan.num_warm_up
            tasks.append(asyncio.create_task(self._send(prompt, is_warm_up)))
        return list(await asyncio.gather(*tasks))

    async def _send(self, prompt: list[int], is_warm_up: bool) -> Injection:
        sent, first = time.perf_counter(), None
        with contextlib.suppress(TimeoutError, ServerSaid, httpx.HTTPError):
            async with asyncio.timeout(self._patience_s):
                first = await self._target.first_token(prompt)
        return Injection(sent, first, len(prompt), is_warm_up)


def since(began: float, round: Round) -> Round:
    """Return the same round with times in seconds since `began`."""

    def moved(at: float | None) -> float | None:
        return None if at is None else at - began

    return Round(
        settled=round.settled - began,
        ended=round.ended - began,
        streams=tuple(tuple(at - began for at in times) for times in round.streams),
        injections=tuple(
            Injection(it.sent - began, moved(it.first_token), it.num_tokens, it.is_warm_up)
            for it in round.injections
        ),
        lost_at=moved(round.lost_at),
    )


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
