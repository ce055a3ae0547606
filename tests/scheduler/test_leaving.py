"""Tests cancels and step errors in each state of a sequence."""

import pytest

from headrace_common.messages import FinishReason
from tests.scheduler.builders import (
    Engine,
    cancel,
    lengths,
    make_scheduler,
    make_submit,
    sequence_ids,
)


def test_a_cancelled_prompt_frees_its_memory_for_the_next_request():
    engine = Engine(make_scheduler(4, max_step_tokens=20)).add(make_submit(1, 60))
    engine.step()
    engine.scheduler.cancel(cancel(1))
    engine.add(make_submit(2, 60))
    plan = engine.step()
    assert sequence_ids(plan) == [2]
    assert plan.ended == (1,)
    engine.run()
    assert engine.finished == {1: (FinishReason.CANCELLED, ""), 2: (FinishReason.LENGTH, "")}


def test_a_cancel_during_a_step_discards_its_tokens_and_then_ends_the_sequence():
    engine = Engine(make_scheduler()).add(make_submit(1, 4))
    first = engine.scheduler.plan(0.0)
    second = engine.scheduler.plan(0.0)
    engine.scheduler.cancel(cancel(1, FinishReason.STOP))
    assert engine.scheduler.plan(0.0) is None
    engine.commit(first)
    assert not engine.finished and not engine.tokens
    engine.commit(second)
    assert engine.finished == {1: (FinishReason.STOP, "")}
    engine.scheduler.memory.check()
    assert engine.scheduler.is_idle


def test_a_cancel_after_the_last_token_has_no_effect():
    engine = Engine(make_scheduler()).add(make_submit(1, 4, max_tokens=1))
    plan = engine.scheduler.plan(0.0)
    engine.scheduler.cancel(cancel(1))
    engine.scheduler.cancel(cancel(99))
    engine.commit(plan)
    engine.step()
    assert engine.finished == {1: (FinishReason.LENGTH, "")}


def test_a_cancel_does_not_affect_other_sequences():
    engine = Engine(make_scheduler()).add(make_submit(1, 4), make_submit(2, 4))
    engine.step()
    engine.scheduler.cancel(cancel(1))
    engine.run()
    assert engine.finished[2] == (FinishReason.LENGTH, "")
    assert len(engine.tokens[2]) == 5


def test_the_last_token_is_not_planned_twice_with_two_steps_in_flight():
    engine = Engine(make_scheduler()).add(make_submit(1, 4, max_tokens=2))
    plans = [engine.scheduler.plan(0.0), engine.scheduler.plan(0.0)]
    assert engine.scheduler.plan(0.0) is None
    for plan in plans:
        engine.commit(plan)
    assert engine.tokens == {1: [104, 105]}


def test_only_the_sequence_that_fails_steps_ends_with_an_error():
    engine = Engine(make_scheduler()).add(*[make_submit(i, 4 + i) for i in range(1, 9)])
    engine.step()
    bad = 3
    for _ in range(200):
        plan = engine.scheduler.plan(engine.now)
        engine.take()
        if plan is None:
            break
        if bad in sequence_ids(plan):
            engine.scheduler.fail(plan, "it broke", engine.now)
        else:
            engine.commit(plan)
    assert engine.finished.pop(bad) == (FinishReason.ERROR, "internal_error")
    assert set(engine.finished.values()) == {(FinishReason.LENGTH, "")}
    assert all(len(engine.tokens[i]) == 5 for i in engine.finished)
    engine.scheduler.memory.check()


def test_suspects_run_alone_newest_first_in_every_other_step():
    engine = Engine(make_scheduler()).add(*[make_submit(i, 4) for i in (1, 2, 3)])
    engine.fail()
    engine.add(make_submit(4, 4))
    assert [sequence_ids(engine.step()) for _ in range(4)] == [[3], [3, 4], [2], [2, 3, 4]]


def test_a_step_with_one_sequence_that_fails_ends_only_that_sequence():
    engine = Engine(make_scheduler()).add(make_submit(1, 4))
    engine.fail()
    assert engine.finished == {1: (FinishReason.ERROR, "internal_error")}
    assert not engine.scheduler.must_exit


def test_results_of_steps_launched_after_a_failed_one_are_ignored():
    engine = Engine(make_scheduler(max_step_tokens=4)).add(make_submit(1, 6), make_submit(2, 6))
    first, second = engine.scheduler.plan(0.0), engine.scheduler.plan(0.0)
    assert (lengths(first), lengths(second)) == ([4], [2, 2])
    engine.scheduler.fail(first, "it broke", 0.0)
    engine.take()
    assert list(engine.finished) == [1]
    engine.run()
    assert engine.tokens[2] == [106, 107, 108, 109, 110]


@pytest.mark.parametrize(("num_bad", "must_exit"), [(2, False), (3, True)])
def test_three_consecutive_failures_of_single_sequences_end_the_engine(num_bad, must_exit):
    engine = Engine(make_scheduler()).add(*[make_submit(i, 4) for i in range(num_bad + 2)])
    for _ in range(num_bad + 1):
        engine.fail()
    assert engine.scheduler.must_exit is must_exit


def test_a_suspect_is_cleared_by_its_next_token():
    engine = Engine(make_scheduler(max_step_tokens=8))
    engine.add(make_submit(1, 4, suspect=True), make_submit(2, 12, suspect=True))
    assert [sequence_ids(engine.step()) for _ in range(5)] == [[2], [2], [2], [1], [1, 2]]


def test_progress_is_not_repeated_after_a_failed_step():
    engine = Engine(make_scheduler(max_step_tokens=16)).add(make_submit(1, 20), make_submit(2, 20))
    engine.step()
    assert sequence_ids(engine.fail()) == [1, 2]
    engine.run()
    assert engine.progress == {1: [0, 16, 20], 2: [0, 16, 20]}


def test_an_error_after_a_cancel_changes_nothing():
    engine = Engine(make_scheduler()).add(make_submit(1, 4))
    first = engine.scheduler.plan(0.0)
    engine.scheduler.cancel(cancel(1))
    engine.scheduler.plan(0.0)
    engine.commit(first, errors={1: "not a number"})
    assert engine.finished == {1: (FinishReason.CANCELLED, "")}


def test_a_cancelled_sequence_is_not_suspected_of_a_failed_step():
    engine = Engine(make_scheduler()).add(make_submit(1, 4), make_submit(2, 4))
    plan = engine.scheduler.plan(0.0)
    engine.scheduler.cancel(cancel(1))
    assert engine.scheduler.plan(0.0) is not None
    engine.scheduler.fail(plan, "it broke", 0.0)
    engine.take()
    assert engine.finished == {1: (FinishReason.CANCELLED, "")}
    engine.run()
    assert engine.finished[2] == (FinishReason.LENGTH, "")
