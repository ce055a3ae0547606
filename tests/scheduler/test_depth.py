"""Tests prompts of 100,000 tokens: computed and hashed tokens, and the length of steps."""

from array import array
from random import Random

import msgspec
import pytest

from headrace_common.messages import Submit
from headrace_engine.memory import prefix
from headrace_engine.scheduler.budget import StepTimes, TimeBudget
from headrace_engine.scheduler.cost import Coefficients, StepShape
from tests.scheduler.builders import Engine, make_limits, make_scheduler, make_submit, shape_of

DEPTH, TURN, BLOCK = 100_000, 500, 16
DENSE = Coefficients(c_decode=0.06, c_prompt=0.065, g=5.7e-6, b=2e-3, a=7.6e-7)
"""A model of 0.5 billion parameters on two cores: a token after 100,000 others takes 0.15 s."""


def turn(number: int, token_ids: "array[int]") -> Submit:
    submit = make_submit(number, 1)
    return msgspec.structs.replace(submit, prompts=(token_ids.tobytes(),))


def test_a_turn_of_500_tokens_computes_at_most_one_further_block():
    engine = Engine(make_scheduler(7000, max_model_len=2 * DEPTH))
    rng = Random(0)
    first = array("i", rng.choices(range(1000), k=DEPTH))
    engine.add(turn(1, first)).run()
    answer = array("i", engine.tokens[1])
    second = first + answer + array("i", rng.choices(range(1000), k=TURN))
    plans = engine.add(turn(2, second)).run()
    chunks = [chunk for plan in plans for chunk in plan.chunks if chunk.start < len(second)]
    assert TURN <= sum(chunk.length for chunk in chunks) <= TURN + len(answer) + BLOCK


def test_a_prompt_is_hashed_once_in_any_number_of_steps(monkeypatch):
    hashed = []
    blake2b = prefix.blake2b
    monkeypatch.setattr(
        prefix, "blake2b", lambda data, **k: hashed.append(len(data)) or blake2b(data, **k)
    )
    engine = Engine(make_scheduler(DEPTH // BLOCK + 40, max_model_len=2 * DEPTH))
    token_ids = array("i", Random(0).choices(range(1000), k=DEPTH))
    engine.add(turn(1, token_ids))
    engine.step()
    # This prompt shares half of the first one, and waits for its blocks.
    engine.add(turn(2, token_ids[: DEPTH // 2] + array("i", [1]) * (DEPTH // 2)))
    plans = engine.run()
    assert len(plans) > 1.4 * DEPTH // 512
    assert sum(hashed) <= 2 * (DEPTH + 10 * BLOCK) * (4 + 16 / BLOCK)


@pytest.mark.parametrize("seed", range(4))
def test_the_first_chunk_after_a_long_cached_context_stays_small(seed):
    """Without a limit on their growth, the first step would take 20 s instead of 0.2 s."""
    rng, budget = Random(seed), TimeBudget(make_limits(max_stall_s=0.2, max_step_s=1.0))

    def step(shape: StepShape, is_awaited: bool, cause: str = "") -> float:
        seconds = DENSE.seconds(shape, shape.num_prompt_tokens > 0) * rng.lognormvariate(0, 0.05)
        budget.learn_step(shape, StepTimes(seconds, (), seconds), is_awaited, cause)
        return seconds

    for _ in range(4):
        for decoders, prompts in (([], [(0, 4)]), ([4], []), ([], [(0, 16)]), ([], [(0, 64)])):
            step(shape_of(decoders, prompts), is_awaited=False)
        step(shape_of([], [(64, 8)]), is_awaited=False)
    worst, done = 0.0, 0
    while done < TURN:
        room = budget.open(shape_of([140] * 4, []), is_awaited=True)
        length = room.largest_chunk(DEPTH + done, TURN - done, is_first=True)
        shape = shape_of([140] * 4, [(DEPTH + done, length)] if length else [])
        worst = max(worst, step(shape, is_awaited=True, cause=room.cause))
        done += length
    reading = DENSE.cost(DEPTH, 1)
    # A single token takes 0.73 s in any case.
    assert worst < 3 * reading
