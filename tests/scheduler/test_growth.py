"""Tests scarce memory: allocation block by block, preemption of the newest, cached prefixes."""

import pytest

from headrace_common.messages import FinishReason
from tests.scheduler.builders import (
    Engine,
    cancel,
    lengths,
    make_scheduler,
    make_submit,
)
from tests.scheduler.builders import sequence_ids as ids


@pytest.mark.parametrize(
    ("length", "max_tokens", "num_blocks"), [(16, 1, 1), (16, 2, 2), (1, 17, 2), (1, 16, 1)]
)
def test_a_sequence_holds_blocks_for_all_tokens_but_the_last(length, max_tokens, num_blocks):
    engine = Engine(make_scheduler(10)).add(make_submit(1, length, max_tokens=max_tokens))
    assert max(len(plan.chunks[0].block_ids) for plan in engine.run()) == num_blocks


def test_the_newest_sequence_is_preempted_and_both_finish_with_the_same_tokens():
    a, b = make_submit(1, 16, max_tokens=40), make_submit(2, 16, max_tokens=40)
    engine = Engine(make_scheduler(4, patience=0.0)).add(a, b)
    assert ids(engine.step()) == [1, 2]
    plans = engine.run()
    preempting = next(plan for plan in plans if 2 in plan.ended)
    assert preempting.chunks[0].start == 32 and ids(preempting) == [1]
    for submit in (a, b):
        number = submit.sequences[0].sequence_id
        alone = Engine(make_scheduler(4)).add(submit)
        alone.run()
        assert engine.tokens[number] == alone.tokens[number]
    assert engine.scheduler.missed["preempted"] == 1
    assert engine.scheduler.status().num_preemptions == 1


def test_a_preempted_sequence_continues_after_its_cached_blocks():
    engine = Engine(make_scheduler(4, patience=0.0))
    engine.add(make_submit(1, 16, max_tokens=18), make_submit(2, 16, max_tokens=30))
    begins = [chunk for plan in engine.run() for chunk in plan.chunks if chunk.sequence_id == 2]
    restart = [chunk for chunk in begins[1:] if chunk.length > 1]
    assert [chunk.start for chunk in restart] == [16]
    assert engine.progress[2] == [0, 16]


def test_blocks_allocated_on_demand_let_many_more_sequences_run():
    blocks_in_full = make_scheduler().memory.layout.blocks_for(20 + 4096 - 1)
    engine = Engine(make_scheduler(4 * blocks_in_full + 8))
    engine.add(*[make_submit(i, 20, arrival=0.0, max_tokens=4096) for i in range(20)]).step()
    assert engine.scheduler.status().num_running >= 16


def test_scarce_memory_does_not_change_the_tokens():
    submits = [make_submit(i, 5 * i + 1, max_tokens=12) for i in range(8)]
    scarce, plenty = [Engine(make_scheduler(n)).add(*submits) for n in (5, 1000)]
    scarce.run()
    plenty.run()
    assert scarce.tokens == plenty.tokens
    missed = [engine.scheduler.missed["preempted"] > 0 for engine in (scarce, plenty)]
    assert missed == [True, False]


def test_no_request_fails_under_memory_pressure():
    engine = Engine(make_scheduler(6, patience=0.0))
    engine.add(*[make_submit(i, 20, max_tokens=40) for i in range(12)])
    engine.run(max_steps=5000)
    assert set(engine.finished.values()) == {(FinishReason.LENGTH, "")}
    assert engine.scheduler.missed["preempted"] > 0


def test_preemption_waits_for_the_step_in_flight():
    engine = Engine(make_scheduler(3, patience=0.0))
    engine.add(make_submit(1, 16, max_tokens=9), make_submit(2, 16, max_tokens=9))
    first = engine.scheduler.plan(0.0)
    assert engine.scheduler.plan(0.0) is None
    engine.commit(first)
    assert engine.step().ended == (2,)
    engine.run()


@pytest.mark.parametrize(("length", "credit"), [(1, 0), (16, 0), (17, 16), (48, 32), (49, 48)])
def test_a_repeated_prompt_uses_all_cached_blocks_but_the_last(length, credit):
    engine = Engine(make_scheduler()).add(make_submit(1, length, max_tokens=1))
    engine.run()
    again = make_submit(1, length, max_tokens=1)
    engine.finished.clear()
    assert lengths(engine.add(again).step()) == [length - credit]
    assert engine.progress[1] == [credit, length]


@pytest.mark.parametrize("fields", [{"salt": "other"}, {"use_prefix": False}])
def test_another_salt_or_no_prefix_cache_computes_the_whole_prompt(fields):
    engine = Engine(make_scheduler()).add(make_submit(1, 40, max_tokens=1))
    engine.run()
    engine.finished.clear()
    assert lengths(engine.add(make_submit(1, 40, max_tokens=1, **fields)).step()) == [40]


def test_a_retry_uses_the_blocks_of_a_cancelled_prompt():
    engine = Engine(make_scheduler(max_step_tokens=32)).add(make_submit(1, 100))
    engine.step()
    engine.scheduler.cancel(cancel(1))
    engine.step()
    engine.finished.clear()
    assert engine.add(make_submit(1, 100)).step().chunks[0].start == 32


def test_after_running_out_of_device_memory_steps_are_halved_and_retried():
    engine = Engine(make_scheduler(max_step_tokens=64)).add(make_submit(1, 200, max_tokens=1))
    for _ in range(2):
        plan = engine.scheduler.plan(0.0)
        engine.scheduler.out_of_memory(plan, "out of memory", 0.0)
    assert lengths(engine.run()[0]) == [16]
    assert engine.finished == {1: (FinishReason.LENGTH, "")}


def test_running_out_of_memory_with_the_smallest_steps_is_an_error():
    engine = Engine(make_scheduler(max_step_tokens=16)).add(make_submit(1, 200))
    engine.scheduler.out_of_memory(engine.scheduler.plan(0.0), "out of memory", 0.0)
    engine.take()
    assert engine.finished == {1: (FinishReason.ERROR, "internal_error")}


def test_a_prompt_in_progress_is_preempted_for_an_older_stream():
    engine = Engine(make_scheduler(6, patience=0.0, max_step_tokens=2))
    engine.add(make_submit(1, 14, max_tokens=40))
    for _ in range(8):
        engine.step()
    plans = engine.add(make_submit(2, 60, max_tokens=1)).run()
    assert any(2 in plan.ended for plan in plans)
    assert engine.scheduler.missed["preempted"] == 0
