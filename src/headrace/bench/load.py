"""Makes the load: streams in the background, and prompts sent beside them at their times."""

import asyncio
import contextlib
import random
import time

import httpx

from headrace.bench.record import CellPlan, Injection, Round
from headrace.bench.target import ServerSaid, Target

_START_WITHIN_S = 300.0
_NUM_SETTLED = 4  # tokens of each stream before it counts as running
_WARM_TAIL = 8


class PromptSource:
    """Random token ids, the same for every server; no prompt comes twice."""

    def __init__(self, seed: int, num_vocab: int, warm_share: float = 0.0) -> None:
        self._random = random.Random(seed)
        self._num_plain = num_vocab * 9 // 10  # special tokens stand at the end
        self._warm_share = warm_share
        self._begun: dict[int, list[int]] = {}

    def fresh(self, length: int) -> list[int]:
        return [self._random.randrange(self._num_plain) for _ in range(length)]

    def next(self, length: int) -> list[int]:
        """Cold; or, for the share that is to be warm, with another end than one before."""
        is_warm = self._random.random() < self._warm_share
        if is_warm and length in self._begun and length > _WARM_TAIL:
            return self._begun[length][:-_WARM_TAIL] + self.fresh(_WARM_TAIL)
        self._begun[length] = self.fresh(length)
        return self._begun[length]


class Background:
    """Streams that run until they are closed. `arrivals` has the times of each one's tokens."""

    def __init__(self, target: Target, prompts: list[list[int]]) -> None:
        self.arrivals: list[list[float]] = [[] for _ in prompts]
        self.lost_at: float | None = None
        self._target = target
        self._prompts = prompts
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        """Returns once all of them run; ServerSaid if they do not."""
        self._tasks = [asyncio.create_task(self._run(i)) for i in range(len(self._prompts))]
        deadline = time.perf_counter() + _START_WITHIN_S
        while not all(len(times) >= _NUM_SETTLED for times in self.arrivals):
            for task in self._tasks:
                if task.done():
                    task.result()
                    raise ServerSaid("A stream ended at its beginning.")
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
    """Open loop: prompts leave on time, even if earlier ones are still unanswered."""

    def __init__(
        self, target: Target, prompts: PromptSource, plan: CellPlan, patience_s: float
    ) -> None:
        self._target = target
        self._prompts = prompts
        self._plan = plan
        self._patience_s = patience_s

    async def send(self, first: int, num: int) -> list[Injection]:
        """Prompts number `first` and on of the cell; times are those of time.perf_counter."""
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
    """The same round in seconds since `began`."""

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
