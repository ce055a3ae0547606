"""Tests in virtual time how long prompts delay running streams."""

from random import Random
from typing import NamedTuple

import pytest

from headrace_common.plan import StepPlan
from headrace_engine.scheduler.budget import DEFAULT_SHARE, MOST_DEFAULT_S
from headrace_engine.scheduler.cost import Coefficients, StepShape
from tests.scheduler.builders import Engine, make_scheduler, make_submit

# Even with a target of 60 ms, one token of the prompt fits into each step of four streams.
MACHINE = Coefficients(c_decode=0.020, c_prompt=0.020, g=5e-6, b=1.9e-3, a=4.5e-7)
DEFAULT = {
    "max_stall_s": 0.2,
    "is_default": True,
    "prompt_share": DEFAULT_SHARE,
    "max_step_s": 1.0,
}


class Tiles(NamedTuple):
    """Costs of products in tiles of six rows, as measured with AVX2 on one core of a Zen 4."""

    slowness: float

    def seconds(self, shape: StepShape, with_prompt: bool) -> float:
        tiles, left = divmod(shape.num_new, 6)
        products = 0.045 * tiles + (0.037 if 0 < left <= 4 else 0.045 if left else 0)
        attention = 3.5e-6 * shape.num_context + 1.27e-6 * shape.num_pairs
        return self.slowness * (max(products + 0.03, 0.076) + attention)


class Machine:
    """Runs steps that take as long as on a laptop, with 3 % of noise."""

    def __init__(self, engine: Engine, costs: Coefficients | Tiles = MACHINE) -> None:
        self.engine = engine
        self._costs = costs
        self.gaps: list[float] = []
        self._rng = Random(1)

    def step(self) -> StepPlan | None:
        engine = self.engine
        plan = engine.scheduler.plan(engine.now)
        engine.take()
        if plan is None:
            return None
        shape = StepShape()
        for chunk in plan.chunks:
            shape.add(chunk.start, chunk.length, chunk.length > 1, forward_per_chunk=False)
        seconds = self._costs.seconds(shape, with_prompt=True) * self._rng.uniform(0.97, 1.03)
        self.gaps.append(seconds)
        engine.commit(plan, seconds)
        return plan


def worst_gap(costs: Coefficients | Tiles = MACHINE, **fields: object) -> tuple[float, float]:
    """Send a prompt of 2,048 tokens while four streams decode.

    Return the longest step and the time to first token, in seconds.
    """
    machine = Machine(Engine(make_scheduler(4000, **fields)), costs)
    for number, length in enumerate([20, 40, 80, 160] * 4):
        machine.engine.add(make_submit(number, length, max_tokens=2, arrival=0.0))
    while machine.step() is not None:
        pass
    engine = machine.engine
    engine.add(*[make_submit(i, 128, max_tokens=2000, arrival=engine.now) for i in range(50, 54)])
    for _ in range(30):
        machine.step()
    machine.gaps.clear()
    began = engine.now
    engine.add(make_submit(99, 2048, max_tokens=1, arrival=began))
    while 99 not in engine.tokens:
        machine.step()
    return max(machine.gaps), engine.now - began


def seconds_of_burst(costs: Coefficients | Tiles, number: int, **fields: object) -> float:
    """Return how long requests that arrive together take, with 128 + 48 tokens each."""
    machine = Machine(Engine(make_scheduler(4000, **fields)), costs)
    for length in [20, 40, 80, 160] * 4:
        machine.engine.add(make_submit(len(machine.gaps), length, max_tokens=2, arrival=0.0))
        while machine.step() is not None:
            pass
    engine, began = machine.engine, machine.engine.now
    for i in range(1000, 1000 + number):
        engine.add(make_submit(i, 128, max_tokens=48, arrival=began))
    while machine.step() is not None:
        pass
    return engine.now - began


def test_a_long_prompt_stalls_no_stream_longer_than_the_target():
    for target in (0.06, 0.1, 0.2):
        gap, _ = worst_gap(max_stall_s=target, max_step_s=1.0)
        assert gap <= target * 1.03


def test_without_a_target_stalls_are_longer_and_the_prompt_faster():
    bounded, slower = worst_gap(max_stall_s=0.1, max_step_s=1.0)
    unbounded, faster = worst_gap()
    assert unbounded > 5 * bounded
    assert faster < slower


def test_a_prompt_takes_longer_with_a_lower_target():
    waits = [worst_gap(max_stall_s=target, max_step_s=1.0)[1] for target in (0.06, 0.1, 0.2)]
    assert waits == sorted(waits, reverse=True)


def test_by_default_a_prompt_takes_at_most_1_5_times_as_long():
    slow = [MACHINE.scaled(slowness) for slowness in (0.2, 1, 2, 4)]
    for costs in (*slow, *map(Tiles, (0.5, 0.75, 1))):
        gap, wait = worst_gap(costs, **DEFAULT)
        _, unbounded = worst_gap(costs, max_step_s=1.0)
        assert wait <= 1.5 * unbounded
        assert gap <= MOST_DEFAULT_S * 1.05


def test_the_default_target_rises_only_as_far_as_prompts_need():
    assert worst_gap(MACHINE.scaled(0.2), **DEFAULT)[0] <= 0.2 * 1.05
    assert worst_gap(MACHINE, **DEFAULT)[0] <= 0.2 * 1.05
    assert 0.25 < worst_gap(Tiles(1), **DEFAULT)[0] < 0.45
    explicit = DEFAULT | {"is_default": False}
    assert worst_gap(Tiles(1), **explicit)[0] <= 0.2 * 1.15


@pytest.mark.parametrize("number", [4, 16])
def test_by_default_a_burst_of_short_prompts_takes_little_longer(number: int):
    for costs in (MACHINE, MACHINE.scaled(2), MACHINE.scaled(4), Tiles(1)):
        with_target, without = (
            seconds_of_burst(costs, number, **fields) for fields in (DEFAULT, {"max_step_s": 1.0})
        )
        assert with_target <= 1.14 * without


def test_seconds_at_rate_is_the_shortest_step_with_that_rate():
    costs = Coefficients(b=0.002, a=1e-6, g=1e-5)
    for context, before in ((0, 0.05), (0, 0.2), (3000, 0.1)):
        times = {x: before + costs.cost(context, x) for x in range(1, 513)}
        best = max(x / seconds for x, seconds in times.items())
        shortest = min(seconds for x, seconds in times.items() if x / seconds >= 0.8 * best)
        found = costs.seconds_at_rate(0.8, context, before, 512)
        assert found == pytest.approx(shortest, rel=0.03)
    assert Coefficients().seconds_at_rate(0.8, 0, 0.0, 512) == 0.0


def test_every_stall_is_counted():
    machine = Machine(Engine(make_scheduler(4000, max_stall_s=0.1, max_step_s=1.0)))
    engine = machine.engine
    engine.add(*[make_submit(i, 200, max_tokens=300, arrival=0.0) for i in range(40)])
    num_stalls = 0
    while machine.step() is not None:
        num_stalls += engine.trace.num_decoding > 0 and machine.gaps[-1] > 0.1
    assert num_stalls <= sum(engine.scheduler.missed.values())
    assert engine.scheduler.missed["decode"] > 50
