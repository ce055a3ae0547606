"""Tests background requests: they use idle capacity and are preempted by other requests."""

import random
from collections import deque

import pytest

from headrace_common.plan import StepPlan
from headrace_common.request import BACKGROUND
from headrace_engine.scheduler.plan import BACKGROUND_SHARE
from tests.scheduler.builders import Engine, make_scheduler, make_submit
from tests.scheduler.builders import sequence_ids as ids


def behind(number: int, length: int, **fields: object):
    return make_submit(number, length, priority=BACKGROUND, **fields)


def test_background_requests_finish_if_nothing_else_runs() -> None:
    engine = Engine(make_scheduler()).add(behind(1, 20), behind(2, 20))
    engine.run()
    assert set(engine.finished) == {1, 2}


def test_no_step_has_both_a_stream_and_background_requests() -> None:
    engine = Engine(make_scheduler()).add(behind(1, 20, max_tokens=50), behind(2, 20))
    engine.step()
    engine.add(make_submit(3, 20, max_tokens=10))
    seen = [ids(engine.step()) for _ in range(10)]
    assert seen == [[3]] * 10
    engine.run()
    assert set(engine.finished) == {1, 2, 3}


def test_background_steps_are_not_planned_ahead() -> None:
    scheduler = make_scheduler()
    engine = Engine(scheduler).add(behind(1, 20, max_tokens=50))
    plan = scheduler.plan(0.0)
    assert plan is not None
    assert scheduler.plan(0.0) is None
    engine.commit(plan)
    assert scheduler.plan(engine.now) is not None


def test_background_requests_wait_while_a_stream_has_a_step_in_flight() -> None:
    scheduler = make_scheduler()
    engine = Engine(scheduler).add(make_submit(1, 20, max_tokens=1), behind(2, 20))
    plan = scheduler.plan(0.0)
    assert ids(plan) == [1]
    assert scheduler.plan(0.0) is None  # its only token is being drawn
    engine.commit(plan)
    assert ids(scheduler.plan(engine.now)) == [2]


def test_background_requests_hold_at_most_a_share_of_the_sequences() -> None:
    engine = Engine(make_scheduler(max_num_seqs=8))
    engine.add(*(behind(number, 10, max_tokens=100) for number in range(8)))
    for _ in range(20):
        engine.step()
    assert len(engine.tokens) == 8 // BACKGROUND_SHARE


def test_background_requests_hold_a_share_of_the_memory_but_one_may_hold_all() -> None:
    engine = Engine(make_scheduler(num_blocks=16))
    engine.add(*(behind(number, 32, max_tokens=100) for number in range(4)))
    for _ in range(20):
        engine.step()
    assert len(engine.tokens) == 1
    engine = Engine(make_scheduler(num_blocks=16)).add(behind(1, 15 * 16, max_tokens=3))
    engine.run()
    assert set(engine.finished) == {1}


def test_a_stream_preempts_a_background_request_if_all_sequences_are_taken() -> None:
    engine = Engine(make_scheduler(max_num_seqs=1)).add(behind(1, 20, max_tokens=30))
    for _ in range(5):
        engine.step()
    engine.add(make_submit(2, 20, max_tokens=5))
    while 2 not in engine.finished:
        engine.step()
    before = len(engine.tokens[1])
    engine.run()
    assert before < 10
    assert len(engine.tokens[1]) == 30


def test_a_stream_that_needs_memory_preempts_a_background_request() -> None:
    engine = Engine(make_scheduler(num_blocks=16)).add(behind(1, 12 * 16, max_tokens=30))
    for _ in range(5):
        engine.step()
    engine.add(make_submit(2, 10 * 16, max_tokens=5))
    while 2 not in engine.finished:
        engine.step()
    assert 1 not in engine.finished
    engine.run()
    assert set(engine.finished) == {1, 2}


def test_a_preempted_background_request_does_not_start_before_a_stream() -> None:
    engine = Engine(make_scheduler(max_num_seqs=1)).add(behind(1, 20, client="a", max_tokens=30))
    engine.step()
    engine.add(make_submit(2, 20, client="b", max_tokens=3))
    engine.step()
    engine.add(make_submit(3, 20, client="c", max_tokens=3))
    while len(engine.finished) < 2:
        engine.step()
    assert set(engine.finished) == {2, 3}


def test_a_preempted_background_request_holds_no_memory_back() -> None:
    engine = Engine(make_scheduler(num_blocks=40))
    engine.add(*(behind(number, 45, max_tokens=200, client="a") for number in (1, 2)))
    for _ in range(3):
        engine.step()
    engine.add(make_submit(3, 34 * 16, client="b", max_tokens=30))
    while 3 not in engine.tokens:
        engine.step()
    engine.add(make_submit(4, 60, client="c", max_tokens=3))
    while 4 not in engine.finished:
        engine.step()
    assert 3 not in engine.finished


def test_clients_take_turns_among_background_requests() -> None:
    engine = Engine(make_scheduler(max_num_seqs=4))
    engine.add(*(behind(number, 10, client="a") for number in range(6)))
    engine.add(*(behind(number, 10, client="b") for number in range(6, 9)))
    engine.run()
    order = list(engine.finished)
    assert {order[1], order[3]} <= {6, 7, 8}


@pytest.mark.parametrize("seed", range(30))
def test_random_mixes_all_finish_and_no_step_is_shared(seed: int) -> None:
    rng = random.Random(seed)
    num_blocks, places = rng.choice([8, 20, 60]), rng.choice([1, 3, 8])
    engine = Engine(make_scheduler(num_blocks=num_blocks, max_num_seqs=places))
    scheduler, number = engine.scheduler, 0
    ahead: deque[StepPlan] = deque()
    first = set[int]()
    for _ in range(4000):
        if number < 40 and rng.random() < 0.2:
            number += 1
            fields = {"client": rng.choice("abc"), "arrival": engine.now}
            if rng.random() < 0.5:
                fields["priority"] = BACKGROUND
            else:
                first.add(number)
            engine.add(make_submit(number, rng.randint(1, 100), max_tokens=20, **fields))
        plan = scheduler.plan(engine.now) if len(ahead) < 2 else None
        engine.take()
        if plan is not None:
            kinds = {i in first for i in ids(plan)}
            assert len(kinds) == 1
            assert kinds == {True} or not ahead
            ahead.append(plan)
        if ahead and (plan is None or rng.random() < 0.5):
            engine.commit(ahead.popleft())
        scheduler.memory.check()
        if number == 40 and scheduler.is_idle:
            break
    assert scheduler.is_idle
    assert set(engine.finished) == set(range(1, 41))
    assert all(len(drawn) <= 20 for drawn in engine.tokens.values())
