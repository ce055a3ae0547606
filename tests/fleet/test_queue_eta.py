"""Tests estimated waits against simulated ones."""

import math
import random
import statistics
from collections.abc import Callable

import msgspec
import pytest

from headrace.fleet.queue_eta import QueueEta, TokenDemand, Waiting, starts
from headrace_common.ids import SequenceId
from headrace_common.messages import (
    Finished,
    FinishReason,
    NewToken,
    Outputs,
    PromptAdvance,
    Started,
)
from tests.fleet.fakes import STATUS

NUM_PLACES, NUM_CLIENTS, NUM_PROMPT = 4, 10, 60
STEP_S, PROMPT_STEPS, STEPS_PER_STATUS = 0.03, 10, 8
RATE = NUM_PROMPT / (PROMPT_STEPS * STEP_S)


def test_the_next_request_starts_when_the_first_place_is_free() -> None:
    waiting = [Waiting(1, 10)] * 4
    assert list(starts([7.0, 3.0], 2, 0.0, waiting)) == [3, 7, 14, 18]


def test_a_request_with_a_free_place_waits_for_earlier_prompts() -> None:
    assert list(starts([], 8, 2.0, [Waiting(1, 10)] * 3)) == [2, 3, 4]


def test_no_wait_is_estimated_before_anything_was_measured() -> None:
    forecast, status = QueueEta(), msgspec.structs.replace(STATUS, queue=(SequenceId(1),))
    for _ in range(3):
        forecast.measure_pace(status, 0.0)
        assert next(forecast.starts(status, 1, lambda _: TokenDemand(5, 8))).in_s is None
        forecast.hear(Outputs(started=(Started(SequenceId(0), 5, 0),)))
        forecast.hear(Outputs(tokens=(NewToken(SequenceId(0), 1),)))


class Server:
    """A simulated server; each client sends its next request after an answer."""

    def __init__(self, length: Callable[[], int], limit: Callable[[int], float]) -> None:
        self.forecast = QueueEta()
        self.ratios: list[float] = []
        self._length, self._limit = length, limit
        self._lengths: list[int] = []  # by sequence
        self._waiting: list[int] = []
        self._told: dict[int, tuple[float, float]] = {}  # when, and how long they would wait
        self._prompt: list[int] = []  # the one in work, and the steps it has taken
        self._said: dict[int, int] = {}
        for _ in range(NUM_CLIENTS):
            self._arrive()

    def run(self, num_steps: int) -> None:
        for step in range(num_steps):
            now = step * STEP_S
            self.forecast.hear(self._step(now))
            if step % STEPS_PER_STATUS == 0:
                self._tell(now)

    def _arrive(self) -> None:
        self._waiting.append(len(self._lengths))
        self._lengths.append(self._length())

    def _step(self, now: float) -> Outputs:
        begun: list[Started] = []
        if not self._prompt and self._waiting and len(self._said) < NUM_PLACES:
            number = self._waiting.pop(0)
            self._prompt = [number, 0]
            begun.append(Started(SequenceId(number), NUM_PROMPT, 0))
            told_at, wait = self._told.pop(number, (now, 0.0))
            if now - told_at > 0.5:
                self.ratios.append(wait / (now - told_at))
        tokens = tuple(NewToken(SequenceId(number), 1) for number in self._said)
        ended = [number for number in self._said if self._said[number] == self._lengths[number]]
        self._said = {n: said + 1 for n, said in self._said.items() if n not in ended}
        for _ in ended:
            self._arrive()
        progress = self._read()
        finished = tuple(Finished(SequenceId(number), FinishReason.STOP) for number in ended)
        return Outputs(started=tuple(begun), progress=progress, tokens=tokens, finished=finished)

    def _read(self) -> tuple[PromptAdvance, ...]:
        if not self._prompt:
            return ()
        number, steps = self._prompt[0], self._prompt[1] + 1
        self._prompt = [number, steps]
        if steps == PROMPT_STEPS:
            self._prompt, self._said[number] = [], 1
        return (PromptAdvance(SequenceId(number), steps * NUM_PROMPT // PROMPT_STEPS),)

    def _tell(self, now: float) -> None:
        status = msgspec.structs.replace(
            STATUS,
            num_running=len(self._said) + bool(self._prompt),
            queue=tuple(map(SequenceId, self._waiting)),
            prompt_tokens_per_s=RATE,
        )
        self.forecast.measure_pace(status, now)
        waits = self.forecast.starts(status, NUM_PLACES, self._asked)
        for number, start in zip(self._waiting, waits, strict=False):
            if start.in_s is not None:
                self._told.setdefault(number, (now, start.in_s))

    def _asked(self, number: SequenceId) -> TokenDemand:
        return TokenDemand(NUM_PROMPT, self._limit(self._lengths[number]))


@pytest.mark.parametrize(
    ("length", "limit"),
    [
        (lambda dice: 100, lambda length: 100),
        (lambda dice: 100, lambda length: math.inf),
        (lambda dice: dice.randint(20, 200), lambda length: length),
        (lambda dice: dice.randint(20, 200), lambda length: math.inf),
        (lambda dice: 1 + int(dice.expovariate(0.01)), lambda length: math.inf),
        (lambda dice: dice.choice((10, 400)), lambda length: 400),
    ],
)
def test_the_median_estimated_wait_is_within_a_factor_of_two(
    length: Callable[[random.Random], int], limit: Callable[[int], float]
) -> None:
    dice = random.Random(1)
    server = Server(lambda: length(dice), limit)
    server.run(6000)
    found = statistics.median(server.ratios)
    print(len(server.ratios), "waits, foretold to real:", found)
    assert len(server.ratios) > 30 and 0.5 <= found <= 2
