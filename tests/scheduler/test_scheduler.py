"""Tests the life of sequences in the scheduler."""

from headrace_common.messages import FinishReason
from headrace_common.sampling import Sampling
from tests.scheduler.builders import (
    END_TOKEN,
    Engine,
    cancel,
    lengths,
    make_scheduler,
    make_submit,
    sequence_ids,
)


def test_a_prompt_is_computed_before_its_tokens_are_drawn():
    engine = Engine(make_scheduler()).add(make_submit(1, 20, max_tokens=3))
    assert [lengths(plan) for plan in engine.run()] == [[20], [1], [1]]
    assert engine.tokens == {1: [120, 121, 122]}
    assert engine.progress == {1: [0, 20]}
    assert engine.finished == {1: (FinishReason.LENGTH, "")}


def test_started_is_sent_with_the_plan_and_progress_with_the_commit():
    engine = Engine(make_scheduler(max_step_tokens=8)).add(make_submit(1, 20, max_tokens=1))
    plan = engine.scheduler.plan(0.0)
    engine.take()
    assert engine.outputs[-1].started[0].total == 20
    engine.commit(plan)
    assert engine.outputs[-1].progress[0].processed == 8


def test_only_the_final_chunk_asks_for_a_row_and_draws():
    engine = Engine(make_scheduler(max_step_tokens=8)).add(make_submit(1, 20, max_tokens=2))
    chunks = [plan.chunks[0] for plan in engine.run()]
    assert [c.num_rows for c in chunks] == [0, 0, 1, 1]
    assert [c.draws for c in chunks] == [(), (), (1,), (1,)]
    assert [(c.start, c.length) for c in chunks] == [(0, 8), (8, 8), (16, 4), (20, 1)]


def test_an_end_token_stops_a_sequence():
    engine = Engine(make_scheduler()).add(
        make_submit(1, END_TOKEN, sampling=Sampling(end_token_ids=(100 + END_TOKEN + 1,)))
    )
    engine.run()
    assert engine.tokens[1] == [102, 103]
    assert engine.finished[1] == (FinishReason.STOP, "")


def test_a_plan_names_the_sequences_that_begin_and_have_ended():
    engine = Engine(make_scheduler()).add(make_submit(1, 4, max_tokens=1))
    first = engine.step()
    assert list(first.begun[0].token_ids) == [1001] * 4
    engine.add(make_submit(2, 4, max_tokens=1))
    second = engine.step()
    assert second.ended == (1,)


def test_max_tokens_zero_computes_the_prompt_and_draws_nothing():
    engine = Engine(make_scheduler(4, max_step_tokens=60)).add(make_submit(1, 64, max_tokens=0))
    plans = engine.run()
    assert [lengths(plan) for plan in plans] == [[60], [4]]
    assert all(not c.draws and not c.num_rows for plan in plans for c in plan.chunks)
    assert engine.finished == {1: (FinishReason.LENGTH, "")}


def test_an_empty_prompt_is_refused_and_the_next_one_proceeds():
    engine = Engine(make_scheduler()).add(make_submit(1, 0), make_submit(2, 4))
    engine.run()
    assert engine.finished == {
        1: (FinishReason.ERROR, "empty_prompt"),
        2: (FinishReason.LENGTH, ""),
    }
    assert 1 not in engine.progress


def test_a_sequence_that_fills_the_block_pool_finishes_with_length():
    engine = Engine(make_scheduler(4))
    engine.add(make_submit(1, 60, max_tokens=50), make_submit(2, 63, max_tokens=None))
    engine.run()
    assert (len(engine.tokens[1]), len(engine.tokens[2])) == (4, 1)
    assert engine.finished == {1: (FinishReason.LENGTH, ""), 2: (FinishReason.LENGTH, "")}


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers():
    engine = Engine(make_scheduler(4)).add(make_submit(1, 64), make_submit(2, 65, max_tokens=0))
    engine.take()
    assert [end.code for end in engine.outputs[-1].finished] == ["context_length_exceeded"] * 2
    assert "64 tokens" in engine.outputs[-1].finished[0].message
    assert engine.scheduler.is_idle


def test_a_recovered_sequence_is_computed_with_its_tokens_and_continues():
    engine = Engine(make_scheduler()).add(make_submit(1, 10, generated=3, max_tokens=5))
    plans = engine.run()
    assert [lengths(plan) for plan in plans] == [[13], [1]]
    assert (plans[0].begun[0].num_prompt, len(plans[0].begun[0].token_ids)) == (10, 13)
    assert engine.tokens == {1: [113, 114]}
    assert engine.progress == {1: [0, 10]}


def test_a_recovered_sequence_at_its_maximum_ends_before_any_step():
    engine = Engine(make_scheduler()).add(make_submit(1, 10, generated=5, max_tokens=5))
    assert engine.step() is None
    assert engine.finished == {1: (FinishReason.LENGTH, "")}


def test_prompt_logprobs_ask_for_all_rows_in_every_chunk():
    sampling = Sampling(max_tokens=2, num_prompt_logprobs=1)
    engine = Engine(make_scheduler(max_step_tokens=8)).add(make_submit(1, 20, sampling=sampling))
    assert [plan.chunks[0].num_rows for plan in engine.run()] == [8, 8, 4, 1]


def test_prompt_logprobs_are_not_computed_again_after_a_failed_step():
    sampling = Sampling(max_tokens=2, num_prompt_logprobs=1)
    engine = Engine(make_scheduler(max_step_tokens=16))
    engine.add(make_submit(1, 20, sampling=sampling), make_submit(2, 20, sampling=sampling))
    engine.step()
    engine.fail()
    chunks = [c for plan in engine.run() for c in plan.chunks if c.sequence_id == 1]
    assert [(c.length, c.num_rows) for c in chunks] == [(16, 0), (4, 4), (1, 1)]


def test_a_row_error_ends_only_its_sequence():
    engine = Engine(make_scheduler()).add(make_submit(1, 4), make_submit(2, 4))
    engine.step(errors={1: "not a number"})
    engine.run()
    assert engine.finished == {
        1: (FinishReason.ERROR, "internal_error"),
        2: (FinishReason.LENGTH, ""),
    }
    assert len(engine.tokens[2]) == 5


def test_status_shows_the_queue_in_order():
    engine = Engine(make_scheduler(max_num_seqs=1))
    engine.add(make_submit(1, 4), make_submit(3, 4), make_submit(2, 900))
    engine.step()
    status = engine.scheduler.status()
    assert (status.num_running, status.num_waiting, status.queue) == (1, 2, (3, 2))
    assert status.num_waiting_tokens == 904


def test_equal_inputs_give_equal_plans():
    def plans():
        submits = [make_submit(i, 3 * i, max_tokens=i) for i in range(1, 20)]
        return Engine(make_scheduler(12, max_step_tokens=16)).add(*submits).run()

    assert plans() == plans()


def test_a_slot_is_held_by_each_running_sequence():
    engine = Engine(make_scheduler(0, num_slots=2)).add(*[make_submit(i, 4) for i in (1, 2, 3)])
    plan = engine.step()
    assert sorted(c.slot_id for c in plan.chunks) == [0, 1]
    assert sequence_ids(plan) == [1, 2]
    assert engine.run()[-1].chunks[0].sequence_id == 3


def test_a_cancel_before_the_first_step_takes_effect_with_the_next_plan():
    engine = Engine(make_scheduler()).add(make_submit(1, 4))
    engine.scheduler.cancel(cancel(1))
    assert engine.step() is None
    assert engine.finished == {1: (FinishReason.CANCELLED, "")}


def test_an_end_token_counts_as_a_token_wherever_it_is_drawn():
    for number_of_end in (1, 3):
        end = 100 + 10 + number_of_end - 1
        sampling = Sampling(end_token_ids=(end,))
        engine = Engine(make_scheduler()).add(make_submit(1, 10, sampling=sampling))
        engine.run()
        assert len(engine.tokens[1]) == number_of_end
        assert engine.finished[1] == (FinishReason.STOP, "")


def test_a_refused_request_changes_nothing_for_the_others():
    def outcome(*more):
        engine = Engine(make_scheduler(8)).add(make_submit(1, 30), *more, make_submit(2, 20))
        plans = engine.run()
        return [lengths(plan) for plan in plans], engine.tokens

    assert outcome() == outcome(make_submit(8, 0), make_submit(9, 128))
