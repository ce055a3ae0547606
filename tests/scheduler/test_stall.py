"""The promise itself, in virtual time: what a long prompt costs the streams beside it."""

from random import Random
from typing import NamedTuple

from headrace_common.plan import StepPlan
from headrace_engine.scheduler.budget import DEFAULT_SHARE
from headrace_engine.scheduler.cost import Coefficients, StepShape
from tests.scheduler.builders import Engine, make_scheduler, make_submit

# at 60 ms one token of the prompt still fits beside four streams, wherever in the prompt it is
MACHINE = Coefficients(c_decode=0.020, c_prompt=0.020, g=5e-6, b=1.9e-3, a=4.5e-7)
DEFAULT = {"max_stall_s": 0.2, "prompt_share": DEFAULT_SHARE, "max_step_s": 1.0}


class Tiles(NamedTuple):
    """Products take six rows as fast as five: measured with AVX2 on one core of a Zen 4."""

    slowness: float

    def seconds(self, shape: StepShape, with_prompt: bool) -> float:
        tiles, left = divmod(shape.num_new, 6)
        products = 0.045 * tiles + (0.037 if 0 < left <= 4 else 0.045 if left else 0)
        attention = 3.5e-6 * shape.num_context + 1.27e-6 * shape.num_pairs
        return self.slowness * (max(products + 0.03, 0.076) + attention)


class Machine:
    """Steps take the time that a laptop would, with a few percent of noise."""

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
    """Four streams decode while 2,048 tokens arrive: longest step, seconds to their first token."""
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


def test_a_long_prompt_stalls_no_stream_beyond_the_target():
    for target in (0.06, 0.1, 0.2):
        gap, _ = worst_gap(max_stall_s=target, max_step_s=1.0)
        assert gap <= target * 1.03


def test_without_a_target_the_prompt_stalls_them_by_the_cap():
    bounded, slower = worst_gap(max_stall_s=0.1, max_step_s=1.0)
    unbounded, faster = worst_gap()
    assert unbounded > 5 * bounded
    assert faster < slower


def test_a_tighter_target_costs_the_prompt_time():
    waits = [worst_gap(max_stall_s=target, max_step_s=1.0)[1] for target in (0.06, 0.1, 0.2)]
    assert waits == sorted(waits, reverse=True)


def test_by_default_a_prompt_waits_at_most_twice_as_long_as_without_a_target():
    for slowness in (0.2, 1, 2, 4):
        costs = MACHINE.scaled(slowness)
        gap, wait = worst_gap(costs, **DEFAULT)
        _, unbounded = worst_gap(costs, max_step_s=None)
        assert wait <= 2 * unbounded
        four = StepShape(num_forwards=1, num_context=4 * 400, num_new=4, num_pairs=4 * 800)
        alone = costs.seconds(four, with_prompt=True)
        assert gap <= max(0.2, (1 + DEFAULT_SHARE) * alone) * 1.1


def test_the_default_target_gives_way_no_further_than_prompts_need():
    for slowness in (0.5, 0.75, 1):
        gap, wait = worst_gap(Tiles(slowness), **DEFAULT)
        assert gap <= 0.2 * 1.15
        _, unbounded = worst_gap(Tiles(slowness), max_step_tokens=4096)
        assert wait <= 2 * unbounded


def test_no_stall_goes_uncounted():
    machine = Machine(Engine(make_scheduler(4000, max_stall_s=0.1, max_step_s=1.0)))
    engine = machine.engine
    engine.add(*[make_submit(i, 200, max_tokens=300, arrival=0.0) for i in range(40)])
    num_stalls = 0
    while machine.step() is not None:
        num_stalls += engine.trace.num_decoding > 0 and machine.gaps[-1] > 0.1
    assert num_stalls <= sum(engine.scheduler.missed.values())
    assert engine.scheduler.missed["decode"] > 50
