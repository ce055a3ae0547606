"""Tests several choices of one prompt: the prompt is computed once."""

import msgspec

from headrace_common.ids import SequenceId
from headrace_common.messages import FinishReason, NewSequence
from headrace_common.sampling import Sampling
from tests.scheduler.builders import (
    Engine,
    cancel,
    lengths,
    make_family,
    make_scheduler,
    make_submit,
    packed,
)


def test_siblings_draw_their_first_tokens_from_one_row():
    engine = Engine(make_scheduler()).add(make_family(3, 20, max_tokens=2))
    plan = engine.step()
    assert [(c.length, c.draws) for c in plan.chunks] == [(20, (0, 1, 2))]
    assert [begin.choice for begin in plan.begun] == [0, 1, 2]
    engine.run()
    assert engine.tokens == {0: [120, 121], 1: [120, 121], 2: [120, 121]}


def test_siblings_share_full_blocks_and_get_a_copy_of_the_last_one():
    engine = Engine(make_scheduler()).add(make_family(2, 20, max_tokens=3))
    plan = engine.step()
    first, second = (chunk.block_ids for chunk in engine.step().chunks)
    assert first[0] == second[0] and first[1] != second[1]
    assert [(c.source, c.target) for c in plan.block_copies] == [(first[1], second[1])]


def test_a_prompt_of_whole_blocks_needs_no_copy():
    engine = Engine(make_scheduler()).add(make_family(2, 32, max_tokens=2))
    assert engine.step().block_copies == ()
    engine.run()


def test_a_slot_is_copied_for_each_sibling():
    engine = Engine(make_scheduler(0, num_slots=3)).add(make_family(3, 5, max_tokens=2))
    plan = engine.step()
    source = plan.chunks[0].slot_id
    assert [copy.source for copy in plan.slot_copies] == [source] * 2
    assert len({source, *(copy.target for copy in plan.slot_copies)}) == 3


def test_siblings_that_start_later_use_the_cached_prompt():
    engine = Engine(make_scheduler(max_num_seqs=2)).add(make_family(3, 33, max_tokens=2))
    plans = engine.run()
    assert plans[0].chunks[0].draws == (0, 1)
    late = next(c for plan in plans[1:] for c in plan.chunks if c.sequence_id == 2)
    assert (late.start, late.length) == (32, 1)


def test_only_the_first_choice_of_a_prompt_reports_progress():
    sampling = Sampling(max_tokens=2, num_prompt_logprobs=0)
    engine = Engine(make_scheduler(max_step_tokens=8)).add(make_family(3, 20, sampling=sampling))
    plans = engine.run()
    assert engine.progress == {0: [0, 8, 16, 20]}
    assert [c.num_rows for plan in plans for c in plan.chunks if c.sequence_id == 0][:3] == [
        8,
        8,
        4,
    ]


def test_a_suspect_choice_reports_its_own_prompt_logprobs():
    """Suspects run alone, the newest first."""
    sampling = Sampling(max_tokens=2, num_prompt_logprobs=0)
    family = msgspec.structs.replace(make_family(2, 20, sampling=sampling), suspect=True)
    plans = Engine(make_scheduler(max_step_tokens=8)).add(family).run()
    first = [chunk for plan in plans[:3] for chunk in plan.chunks]
    assert [(c.sequence_id, c.num_rows) for c in first] == [(1, 8), (1, 8), (1, 4)]


def test_if_the_first_choice_is_cancelled_the_next_one_computes_the_prompt():
    engine = Engine(make_scheduler(max_step_tokens=8)).add(make_family(3, 20, max_tokens=1))
    engine.scheduler.cancel(cancel(0))
    assert engine.step().chunks[0].sequence_id == 1
    engine.scheduler.cancel(cancel(1))
    engine.run()
    assert engine.finished == {
        0: (FinishReason.CANCELLED, ""),
        1: (FinishReason.CANCELLED, ""),
        2: (FinishReason.LENGTH, ""),
    }
    assert list(engine.progress) == [1]


def test_a_sibling_that_has_not_started_is_cancelled_at_once():
    engine = Engine(make_scheduler(max_step_tokens=8)).add(make_family(2, 20, max_tokens=1))
    engine.step()
    engine.scheduler.cancel(cancel(1))
    engine.run()
    assert engine.finished[1] == (FinishReason.CANCELLED, "")


def test_recovered_siblings_wait_for_the_prompt_and_then_run_separately():
    submit = make_family(2, 40, max_tokens=5)
    news = [msgspec.structs.replace(new, generated=packed([7] * 2)) for new in submit.sequences]
    submit = msgspec.structs.replace(submit, sequences=tuple(news))
    plans = Engine(make_scheduler()).add(submit).run()
    assert [lengths(plan) for plan in plans[:2]] == [[42], [1, 10]]


def test_a_recovered_sibling_continues_after_the_first_choice_was_complete():
    submit = make_family(2, 40, max_tokens=5)
    whole, cut = submit.sequences
    whole = msgspec.structs.replace(whole, generated=packed([7] * 5))
    cut = msgspec.structs.replace(cut, generated=packed([7] * 2))
    engine = Engine(make_scheduler())
    engine.add(msgspec.structs.replace(submit, sequences=(whole, cut))).run()
    assert engine.finished == {0: (FinishReason.LENGTH, ""), 1: (FinishReason.LENGTH, "")}
    assert len(engine.tokens[1]) == 3


def test_recovered_suspects_of_one_prompt_run_alone():
    engine = Engine(make_scheduler()).add(make_family(3, 40, max_tokens=2, suspect=True))
    assert [len(engine.step().chunks) for _ in range(3)] == [1, 1, 1]
    engine.run()
    assert set(engine.finished.values()) == {(FinishReason.LENGTH, "")}


def test_after_a_failed_step_all_siblings_run_again():
    engine = Engine(make_scheduler()).add(make_family(3, 20, max_tokens=2))
    engine.fail()
    engine.run()
    assert engine.tokens == {0: [120, 121], 1: [120, 121], 2: [120, 121]}


def test_choices_share_only_the_row_of_their_own_prompt():
    submit = make_submit(0, 20, max_tokens=1)
    news = tuple(NewSequence(SequenceId(i), i // 2, i) for i in range(4))
    prompts = (packed([5] * 20), packed([6] * 20))
    submit = msgspec.structs.replace(submit, sequences=news, prompts=prompts)
    plan = Engine(make_scheduler()).add(submit).step()
    assert [c.draws for c in plan.chunks] == [(0, 1), (2, 3)]


def test_siblings_that_draw_nothing_run_separately():
    engine = Engine(make_scheduler()).add(make_family(2, 20, max_tokens=0))
    plans = engine.run()
    assert [lengths(plan) for plan in plans] == [[20], [4]]
    assert set(engine.finished.values()) == {(FinishReason.LENGTH, "")}


def test_prompt_logprobs_are_complete_after_a_failed_last_chunk():
    """The failed step had the last chunk of the prompt, so its rows were not reported."""
    sampling = Sampling(max_tokens=2, num_prompt_logprobs=0)
    engine = Engine(make_scheduler(max_step_tokens=16))
    engine.add(make_family(2, 20, sampling=sampling))
    engine.step()
    plan = engine.scheduler.plan(1.0)
    assert plan is not None and plan.chunks[0].draws == (0, 1)
    engine.scheduler.fail(plan, "It failed.", 1.0)
    plans = engine.run()
    second = [chunk for plan in plans for chunk in plan.chunks if chunk.sequence_id == 1]
    assert [chunk.num_rows for chunk in second][:2] == [16, 4]
