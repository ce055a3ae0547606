"""Tests lanes with recurrent state: slots, and snapshots that are saved and restored."""

from tests.scheduler.builders import Engine, lengths, make_family, make_scheduler, make_submit


def hybrid_engine() -> Engine:
    """Return an engine with a snapshot every 64 positions and at a prompt's last boundary."""
    return Engine(make_scheduler(num_slots=2, num_snapshots=4))


def test_chunks_end_at_snapshot_boundaries():
    engine = hybrid_engine().add(make_submit(1, 150, max_tokens=1))
    plans = engine.run()
    assert [lengths(plan) for plan in plans] == [[64], [64], [16], [6]]
    assert [len(plan.slot_copies) for plan in plans] == [1, 1, 1, 0]
    assert {copy.source for plan in plans for copy in plan.slot_copies} == {0}


def test_a_decoding_stream_saves_its_state_at_each_boundary():
    engine = hybrid_engine().add(make_submit(1, 60, max_tokens=10))
    saving = [plan for plan in engine.run() if plan.slot_copies]
    assert [plan.chunks[0].start + plan.chunks[0].length for plan in saving] == [48, 64]


def test_a_repeated_prompt_restores_the_state_and_computes_the_rest():
    engine = hybrid_engine().add(make_submit(1, 150, max_tokens=1))
    last_save = [plan.slot_copies for plan in engine.run() if plan.slot_copies][-1]
    engine.finished.clear()
    plan = engine.add(make_submit(1, 150, max_tokens=1)).step()
    assert lengths(plan) == [6]
    assert [copy.source for copy in plan.restores] == [last_save[0].target]
    assert plan.restores[0].target == plan.chunks[0].slot_id
    assert engine.progress[1] == [144, 150]


def test_a_snapshot_of_a_failed_step_is_not_used():
    engine = hybrid_engine()
    engine.add(make_submit(1, 64, max_tokens=1), make_submit(2, 64, max_tokens=1))
    engine.fail()
    plan = engine.step()
    assert plan.restores == () and plan.chunks[0].start == 0
    engine.run()


def test_a_sibling_gets_a_copy_of_the_state():
    engine = hybrid_engine().add(make_family(2, 20, max_tokens=2))
    engine.step()
    plan = engine.step()
    assert plan.chunks[0].draws == (0, 1)
    assert [(copy.source, copy.target) for copy in plan.slot_copies] == [(0, 1)]
    engine.run()
