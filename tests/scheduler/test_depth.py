"""Prompts of 100,000 tokens: counts of what a turn computes and hashes, and gaps behind them."""

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
"""A model of half a billion parameters on two cores: a token behind 100,000 takes .15 s."""


def turn(number: int, token_ids: "array[int]") -> Submit:
    submit = make_submit(number, 1)
    return msgspec.structs.replace(submit, prompts=(token_ids.tobytes(),))


def test_a_turn_that_adds_500_tokens_computes_them_and_at_most_a_block():
    engine = Engine(make_scheduler(7000, max_model_len=2 * DEPTH))
    rng = Random(0)
    first = array("i", rng.choices(range(1000), k=DEPTH))
    engine.add(turn(1, first)).run()
    answer = array("i", engine.tokens[1])
    second = first + answer + array("i", rng.choices(range(1000), k=TURN))
    plans = engine.add(turn(2, second)).run()
    chunks = [chunk for plan in plans for chunk in plan.chunks if chunk.start < len(second)]
    assert TURN <= sum(chunk.length for chunk in chunks) <= TURN + len(answer) + BLOCK


def test_a_prompt_is_hashed_once_however_many_steps_it_takes_and_waits(monkeypatch):
    hashed = []
    blake2b = prefix.blake2b
    monkeypatch.setattr(
        prefix, "blake2b", lambda data, **k: hashed.append(len(data)) or blake2b(data, **k)
    )
    engine = Engine(make_scheduler(DEPTH // BLOCK + 40, max_model_len=2 * DEPTH))
    token_ids = array("i", Random(0).choices(range(1000), k=DEPTH))
    engine.add(turn(1, token_ids))
    engine.step()
    # shares half of it, and waits for blocks until the first is done
    engine.add(turn(2, token_ids[: DEPTH // 2] + array("i", [1]) * (DEPTH // 2)))
    plans = engine.run()
    assert len(plans) > 1.4 * DEPTH // 512
    assert sum(hashed) <= 2 * (DEPTH + 10 * BLOCK) * (4 + 16 / BLOCK)


@pytest.mark.parametrize("seed", range(4))
def test_the_first_chunk_behind_a_long_context_is_no_leap(seed):
    """A cached context may be long before one was ever measured: with room for .2 s, it took 20."""
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
    assert worst < 3 * reading  # one token takes .73 s whatever is done
