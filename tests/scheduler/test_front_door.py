"""Tests status, traces, warm-up and suspects."""

import pytest

from headrace_common.plan import ChunkResult, Drawn, StepResult
from headrace_common.sampling import Logprobs, Sampling
from tests.scheduler.builders import Engine, cancel, make_scheduler, make_submit
from tests.scheduler.builders import sequence_ids as ids


def measured_engine(**fields: object) -> Engine:
    """Return an engine that has learned that a step takes 10 ms plus 1 ms per token."""
    scheduler = make_scheduler(**fields)
    for new in (10, 20, 40) * 3:
        scheduler.observe([(0, new)], 0.01 + 0.001 * new)
    for context in (10, 100, 1000) * 3:
        scheduler.observe([(context, 1)], 0.011)
    return Engine(scheduler)


def test_warm_up_steps_train_the_cost_model():
    engine = measured_engine(max_stall_s=0.05)
    engine.add(make_submit(1, 4, max_tokens=50)).step(seconds=0.014)
    engine.add(make_submit(2, 500, arrival=1.0))
    engine.step()
    trace = engine.trace
    assert trace.num_decoding == 1 and 30 <= trace.num_prompt_tokens <= 39
    assert trace.predicted <= 0.05 and trace.room == pytest.approx(0.04, abs=0.004)


def test_a_stall_outside_the_scheduler_is_counted_with_the_others():
    engine = Engine(make_scheduler(max_stall_s=0.1)).add(make_submit(1, 4))
    engine.step()
    engine.scheduler.count_missed("gateway")
    for _ in range(2):
        engine.now += 5.0
        engine.step()
    assert engine.scheduler.missed == {"gateway": 1, "model": 1}


def test_time_between_steps_counts_unless_the_engine_was_idle():
    engine = Engine(make_scheduler()).add(make_submit(1, 4, max_tokens=2))
    elapsed = []
    for pause in (3.0, 0.5, 9.0):
        engine.now += pause
        engine.step(seconds=0.01)
        elapsed.append(engine.trace.elapsed)
        if engine.scheduler.is_idle:
            engine.add(make_submit(2, 4))
    assert elapsed == pytest.approx([0.01, 0.51, 0.01])


def test_a_scheduler_has_work_until_its_outputs_are_taken():
    scheduler = make_scheduler()
    assert not scheduler.has_work and scheduler.take_outputs() is None
    scheduler.add(make_submit(1, 0), 0.0)
    assert scheduler.is_idle and scheduler.has_work
    assert scheduler.take_outputs() is not None
    assert not scheduler.has_work


def test_a_stream_left_out_of_a_suspects_step_is_counted_as_quarantine():
    engine = Engine(make_scheduler()).add(make_submit(1, 4, max_tokens=9))
    engine.step()
    engine.add(make_submit(2, 4, suspect=True, max_tokens=9))
    assert [ids(engine.step()) for _ in range(2)] == [[2], [1, 2]]
    assert engine.scheduler.missed["quarantine"] == 1
    assert engine.trace.cause == ""


def test_no_request_starts_before_an_overdue_suspect():
    engine = Engine(make_scheduler(4, patience=0.0)).add(make_submit(1, 40, max_tokens=9))
    engine.step()
    engine.add(make_submit(2, 30, suspect=True, arrival=0.0), make_submit(3, 2, arrival=0.1))
    assert ids(engine.step()) == [1]
    engine.run()
    assert len(engine.tokens[2]) == 5


def test_requests_may_overtake_a_suspect_that_is_not_due():
    engine = Engine(make_scheduler(5)).add(make_submit(1, 40, max_tokens=4))
    engine.step()
    engine.add(make_submit(2, 30, suspect=True, arrival=99.0), make_submit(3, 2, max_tokens=1))
    assert 3 in ids(engine.step())


def test_prompt_logprobs_are_sent_with_their_positions():
    sampling = Sampling(max_tokens=1, num_prompt_logprobs=0)
    engine = Engine(make_scheduler(max_step_tokens=8)).add(make_submit(1, 12, sampling=sampling))
    rows = Logprobs(1, b"", b"")
    for drawn in ((), (Drawn((5,)),)):
        plan = engine.scheduler.plan(0.0)
        result = StepResult((ChunkResult(drawn, rows),), 0.1)
        engine.scheduler.commit(plan, result, 0.1)
    outputs = engine.scheduler.take_outputs()
    assert outputs is not None
    assert [row.start for row in outputs.prompt_logprobs] == [1, 9]


def test_after_all_requests_are_cancelled_nothing_is_planned():
    engine = Engine(make_scheduler()).add(*[make_submit(i, 40) for i in range(10)])
    engine.step()
    for number in range(10):
        engine.scheduler.cancel(cancel(number))
    assert engine.step() is None
    assert engine.scheduler.is_idle and len(engine.finished) == 10


def test_a_preempted_suspect_runs_again():
    engine = Engine(make_scheduler(3, patience=0.0)).add(make_submit(1, 16, max_tokens=30))
    engine.step()
    engine.add(make_submit(2, 16, suspect=True, max_tokens=2))
    engine.run()
    assert (len(engine.tokens[1]), len(engine.tokens[2])) == (30, 2)


def test_a_prompt_advances_although_an_earlier_one_lacks_memory_and_time_is_short():
    engine = measured_engine(num_blocks=8, max_step_s=0.001, prompt_share=0.0)
    engine.add(make_submit(1, 100, arrival=1.0))
    for _ in range(20):
        engine.now += 0.005  # overhead, which takes longer than a step may
        assert ids(engine.step()) == [1]
    engine.add(make_submit(2, 100, arrival=0.0))
    assert ids(engine.step()) == [1]
