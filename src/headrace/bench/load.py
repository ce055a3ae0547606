"""Generates the load: background streams, and prompts that are sent on schedule meanwhile."""

import asyncio
import contextlib
import random
import time
from collections.abc import Awaitable, Callable

import httpx

from headrace.bench.record import CellPlan, Injection, Round
from headrace.bench.target import ServerSaid, Target

_START_WITHIN_S = 300.0
# The number of tokens after which a stream counts as running.
_NUM_SETTLED = 4
_WARM_TAIL = 8


class PromptSource:
    """Makes prompts of random token ids, the same for every server. All prompts differ."""

    def __init__(self, seed: int | str, num_vocab: int, warm_share: float = 0.0) -> None:
        self._random = random.Random(seed)
        # Special tokens have the highest ids, so prompts use only the lower 90 % of the ids.
        self._num_plain = num_vocab * 9 // 10
        self._warm_share = warm_share
        self._begun: dict[int, list[int]] = {}
        self._shared: list[int] = []

    def begin_with(self, num: int) -> list[int]:
        """Let all later prompts begin with the same `num` tokens, and return these tokens."""
        self._shared = self.fresh(num)
        return self._shared

    def fresh(self, length: int) -> list[int]:
        return [self._random.randrange(self._num_plain) for _ in range(length)]

    def next(self, length: int) -> list[int]:
        """Return a new prompt or, for the fraction `warm_share`, an old prompt with a new end."""
        if self._shared:
            return self._shared + self.fresh(length - len(self._shared))
        is_warm = self._random.random() < self._warm_share
        if is_warm and length in self._begun and length > _WARM_TAIL:
            return self._begun[length][:-_WARM_TAIL] + self.fresh(_WARM_TAIL)
        self._begun[length] = self.fresh(length)
        return self._begun[length]

    def interval(self, mean_s: float) -> float:
        """Return a random time from one prompt to the next, as in a Poisson process."""
        return self._random.expovariate(1 / mean_s)


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
                raise ServerSaid(
                    f"Not all of the {len(self._prompts)} streams started within "
                    f"{_START_WITHIN_S:g} s; use fewer streams."
                )
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
        mean_s = self._plan.interval_s
        due, tasks = time.perf_counter(), []
        for i, prompt in enumerate(prompts):
            await asyncio.sleep(due - time.perf_counter())
            is_warm_up = first + i < self._plan.num_warm_up
            tasks.append(asyncio.create_task(self._send(prompt, is_warm_up)))
            due += self._prompts.interval(mean_s) if self._plan.is_random else mean_s
        return list(await asyncio.gather(*tasks))

    async def _send(self, prompt: list[int], is_warm_up: bool) -> Injection:
        sent, first = time.perf_counter(), None
        with contextlib.suppress(TimeoutError, ServerSaid, httpx.HTTPError):
            async with asyncio.timeout(self._patience_s):
                first = await self._target.first_token(prompt)
        return Injection(sent, first, len(prompt), is_warm_up)


async def run_round(
    background: Background, act: Callable[[], Awaitable[list[Injection]]], lead_s: float
) -> Round:
    """Run the streams, and `act` while they run. Wait `lead_s` before and after `act`."""
    try:
        await background.open()
        settled = time.perf_counter()
        await asyncio.sleep(lead_s)
        injections = await act()
        await asyncio.sleep(lead_s)
        ended, lost_at = time.perf_counter(), background.lost_at
    finally:
        await background.close()
    times = tuple(tuple(times) for times in background.arrivals)
    return Round(settled, ended, times, tuple(injections), lost_at)


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
