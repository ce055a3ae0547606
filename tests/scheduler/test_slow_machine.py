"""Tests the time budget on a machine that is noisy, and slow for seconds at a time."""

from random import Random

import pytest

from headrace_engine.scheduler.budget import StepTimes, TimeBudget
from headrace_engine.scheduler.cost import Coefficients, CostModel, StepShape
from tests.scheduler.builders import make_limits, shape_of

TRUTH = Coefficients(c_decode=0.062, c_prompt=0.066, g=1e-5, b=1.5e-3, a=1.5e-7)
PROMPT, NUM_PROMPTS = 2048, 6
PATIENCE_S = 300.0


class Machine:
    """A machine with noise of 7 %, which is up to 2.2 times as slow for some steps."""

    def __init__(self, seed: int) -> None:
        self._rng = Random(seed)
        self._slowness = 1.0

    def seconds(self, shape: StepShape) -> float:
        if self._rng.random() < (1 / 80 if self._slowness == 1 else 1 / 30):
            self._slowness = self._rng.choice([1.2, 1.4, 1.7, 2.2]) if self._slowness == 1 else 1.0
        usual = TRUTH.seconds(shape, shape.num_prompt_tokens > 0)
        return usual * self._slowness * self._rng.lognormvariate(0, 0.07)


class Knowing(CostModel):
    """A cost model with the true coefficients."""

    def _refit(self) -> None:
        self._fitted = TRUTH


def seconds_to_first_token(model: CostModel, seed: int, target_s: float) -> list[float]:
    """Return the times of consecutive prompts, in seconds, while four streams decode."""
    budget, machine = TimeBudget(make_limits(max_stall_s=target_s, max_step_s=1.0)), Machine(seed)
    budget.model = model

    def step(shape: StepShape, is_awaited: bool, cause: str = "") -> float:
        seconds = machine.seconds(shape)
        budget.learn_step(shape, StepTimes(seconds, (), seconds), is_awaited, cause)
        return seconds

    for _ in range(4):
        for decoders, prompts in (([], [(0, 4)]), ([4], []), ([], [(0, 16)]), ([], [(0, 64)])):
            step(shape_of(decoders, prompts), is_awaited=False)
        step(shape_of([], [(64, 8)]), is_awaited=False)
    found = []
    for _ in range(NUM_PROMPTS):
        took, done, streams = 0.0, 0, [140] * 4
        while done < PROMPT and took < PATIENCE_S:
            room = budget.open(shape_of(streams, []), is_awaited=True)
            length = room.largest_chunk(done, PROMPT - done, is_first=True)
            shape = shape_of(streams, [(done, length)] if length else [])
            took += step(shape, is_awaited=True, cause=room.cause)
            done, streams = done + length, [context + 1 for context in streams]
        found.append(took)
    return found


@pytest.mark.parametrize("target_s", [0.06, 0.1, 0.2])
def test_prompts_take_as_long_as_with_known_costs(target_s):
    """A shorter time would delay the streams. Decoding alone takes 68 ms here."""
    ratios = []
    for seed in range(4):
        found = seconds_to_first_token(CostModel(), seed, target_s)
        known = seconds_to_first_token(Knowing(), seed, target_s)
        ratios.append(sum(found) / sum(known))
    assert min(ratios) > 0.7 and max(ratios) < 1.5


def mean_step_s(seed: int, slowness: float) -> float:
    """The mean time of a step, in seconds, while a prompt runs alone.

    Each step may take one second. The machine has become slower since the start.
    """
    budget, machine = TimeBudget(make_limits(max_stall_s=0.2, max_step_s=1.0)), Machine(seed)

    def step(chunk: tuple[int, int], times: float) -> float:
        shape = shape_of([], [chunk])
        seconds = times * machine.seconds(shape)
        budget.learn_step(shape, StepTimes(seconds, (), seconds), is_awaited=False, cause="")
        return seconds

    for chunk in [(0, 4), (0, 16), (0, 64), (64, 8)] * 4:
        step(chunk, 1.0)
    seconds, done = [], 0
    while done < PROMPT:
        room = budget.open(shape_of([], []), is_awaited=False)
        length = room.largest_chunk(done, PROMPT - done, is_first=True)
        seconds.append(step((done, length), slowness))
        done += length
    return sum(seconds) / len(seconds)


@pytest.mark.parametrize("slowness", [1.0, 2.3, 4.0])
def test_steps_of_a_prompt_alone_use_most_of_their_limit(slowness):
    means = [mean_step_s(seed, slowness) for seed in range(8)]
    assert min(means) > 0.5 and max(means) < 1.3
