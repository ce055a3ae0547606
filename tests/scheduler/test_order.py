"""Tests the order of waiting requests: sort keys, overtaking and queue positions."""

import pytest

from headrace_engine.scheduler.sequence import due_time
from tests.scheduler.builders import Engine, cancel, lengths, make_scheduler, make_submit
from tests.scheduler.builders import sequence_ids as ids


def starts(engine: Engine, max_steps: int = 400) -> list[int]:
    """Return the ids of sequences in the order in which they begin."""
    order: list[int] = []
    for _ in range(max_steps):
        plan = engine.step()
        if plan is None:
            return order
        order += [begin.sequence_id for begin in plan.begun if begin.sequence_id not in order]
    raise AssertionError("too many steps")


def one_at_a_time(*submits, **config) -> list[int]:
    """Return the order in which these requests start if one runs at a time."""
    engine = Engine(make_scheduler(max_num_seqs=1, **config)).add(*submits)
    return starts(engine)


def test_a_short_prompt_starts_before_an_earlier_long_one():
    assert due_time(0, 4, 5000 / 500, 0) == 40
    assert due_time(1, 4, 8 / 500, 0) == pytest.approx(1.064)
    assert one_at_a_time(make_submit(1, 5000, arrival=0.0), make_submit(2, 8, arrival=1.0)) == [
        2,
        1,
    ]


def test_an_overdue_long_prompt_starts_before_a_later_short_one():
    assert one_at_a_time(make_submit(1, 5000, arrival=0.0), make_submit(2, 8, arrival=41.0)) == [
        1,
        2,
    ]


def test_prompts_of_equal_length_start_in_order_of_arrival():
    submits = [make_submit(i, 100, arrival=t) for i, t in ((3, 0.0), (1, 0.1), (2, 0.2))]
    assert one_at_a_time(*submits) == [3, 1, 2]


def test_a_level_of_priority_is_worth_ten_seconds():
    submits = [make_submit(1, 8, arrival=0.0, priority=1)]
    submits += [make_submit(2, 8, arrival=5.0), make_submit(3, 8, arrival=11.0)]
    assert one_at_a_time(*submits) == [2, 1, 3]


def test_without_patience_requests_start_in_order_of_arrival():
    submits = [make_submit(1, 5000, arrival=0.0), make_submit(2, 8, arrival=0.5)]
    assert one_at_a_time(*submits, patience=0.0) == [1, 2]


def test_the_sort_key_decides_and_not_the_sequence_id():
    numbers = [5, 3, 9, 1, 7]
    submits = [make_submit(i, 20, arrival=float(t)) for t, i in enumerate(numbers)]
    assert one_at_a_time(*reversed(submits)) == numbers


def test_a_decoding_stream_is_in_every_step_while_a_prompt_is_open():
    engine = Engine(make_scheduler(max_step_tokens=16))
    engine.add(make_submit(1, 4, max_tokens=40))
    engine.step()
    engine.add(make_submit(2, 300))
    plans = [engine.step() for _ in range(20)]
    assert all(ids(plan)[0] == 1 and lengths(plan) == [1, 15] for plan in plans)


def test_a_very_long_prompt_does_not_delay_the_next_one():
    def steps_to_first_token(*before):
        engine = Engine(make_scheduler(100_000, max_model_len=1_000_000)).add(*before)
        for _ in range(3):
            engine.step()
        engine.add(make_submit(2, 101, arrival=engine.now))
        for number in range(100):
            engine.step()
            if 2 in engine.tokens:
                return number
        raise AssertionError("not in 100 steps")

    assert steps_to_first_token(make_submit(1, 600_000, arrival=0.0)) == steps_to_first_token()


def test_many_short_prompts_delay_a_long_one_only_until_it_is_due():
    engine = Engine(make_scheduler(max_step_tokens=64)).add(make_submit(0, 500, arrival=0.0))
    for number in range(1, 2000):
        engine.add(make_submit(number, 60, max_tokens=1, arrival=engine.now))
        engine.step(seconds=0.02)
        if 0 in engine.tokens:
            break
    due = 4 * 500 / 500
    assert engine.now < due + 10 * 0.02 * 500 / 60


@pytest.mark.parametrize(("max_open_prompts", "expected"), [(2, [2, 1]), (3, [2, 3, 1])])
def test_beyond_max_open_prompts_only_a_prompt_due_before_all_open_ones_starts(
    max_open_prompts, expected
):
    config = {"max_open_prompts": max_open_prompts, "patience": 0.0}
    engine = Engine(make_scheduler(max_step_tokens=10, **config))
    for submit in (make_submit(1, 30, arrival=9.0), make_submit(2, 15, arrival=1.0)):
        engine.add(submit).step()
    engine.add(make_submit(3, 4, arrival=5.0))
    assert ids(engine.step()) == expected


def test_a_prompt_due_before_all_open_ones_starts():
    engine = Engine(make_scheduler(max_step_tokens=10, max_open_prompts=1, patience=0.0))
    engine.add(make_submit(1, 30, arrival=9.0)).step()
    engine.add(make_submit(2, 4, arrival=1.0))
    assert ids(engine.step()) == [2, 1]


def test_a_prompt_that_lacks_blocks_may_be_overtaken_until_it_is_due():
    engine = Engine(make_scheduler(4)).add(make_submit(1, 16, arrival=0.0, max_tokens=17))
    engine.step()
    engine.add(make_submit(2, 48, arrival=0.0), make_submit(3, 8, arrival=0.2, max_tokens=1))
    assert engine.scheduler.status().queue == (3, 2)
    engine.scheduler.cancel(cancel(3))
    engine.add(make_submit(4, 16, arrival=0.4, max_tokens=1))
    assert engine.scheduler.status().queue[0] in (2, 3)
    assert 4 in ids(engine.step())  # sequence 2 is not yet due
    assert engine.now < 4 * 48 / 500
    engine.add(make_submit(5, 8, arrival=0.5, max_tokens=1))
    engine.now = 0.6
    # Now sequence 2 is due, so no other one overtakes it.
    assert 5 not in ids(engine.step())


def test_no_request_overtakes_more_than_sixteen_others():
    engine = Engine(make_scheduler(8, max_num_seqs=64)).add(make_submit(0, 64, arrival=0.0))
    engine.step()
    engine.add(*[make_submit(i, 100, arrival=10.0) for i in range(1, 17)])
    engine.add(make_submit(50, 1, arrival=20.0))
    assert ids(engine.step()) == [0]


def test_a_request_starts_only_if_each_running_one_keeps_a_spare_block():
    engine = Engine(make_scheduler(3)).add(*[make_submit(i, 16, arrival=0.0) for i in (1, 2)])
    assert ids(engine.step()) == [1, 2]
    engine.add(make_submit(3, 1, arrival=0.0))
    assert 3 not in ids(engine.step())


def test_without_a_free_slot_no_sequence_starts():
    engine = Engine(make_scheduler(100, num_slots=1, max_num_seqs=4))
    engine.add(make_submit(1, 4, max_tokens=2), make_submit(2, 4), make_submit(3, 4))
    assert [ids(engine.step()) for _ in range(3)] == [[1], [1], [2]]


def test_a_client_with_100_requests_does_not_delay_another_client():
    crowd = [make_submit(i, 20, arrival=0.0, client="a") for i in range(1, 101)]
    engine = Engine(make_scheduler(max_num_seqs=2)).add(*crowd)
    begun = [b.sequence_id for _ in range(40) for b in engine.step().begun]
    engine.add(make_submit(200, 20, arrival=300.0, client="b"))
    engine.add(make_submit(201, 20, arrival=300.0, client="b"))
    later = starts(engine, 2000)
    assert begun == list(range(1, len(begun) + 1)) and len(begun) > 10
    assert later.index(200) <= 1 and later.index(201) <= 3
    assert [number for number in later if number < 200] == list(range(len(begun) + 1, 101))


def test_clients_take_turns_by_the_cost_of_their_prompts():
    long = [make_submit(i, 2000, arrival=0.0, client="long") for i in range(1, 5)]
    short = [make_submit(i, 8, arrival=1.0, client="short") for i in range(11, 31)]
    order = one_at_a_time(*long, *short)
    assert order[0] == 11 and order.index(1) == 1, "each in turn"
    assert 4 <= order.index(2) - order.index(1) - 1 <= 6, "2,000 tokens are four seconds"


def test_priority_is_worth_ten_seconds_of_a_clients_share():
    late = [make_submit(i, 8, arrival=0.0, client="a", priority=1) for i in (1, 2)]
    others = [make_submit(i, 8, arrival=0.0, client="b") for i in range(11, 31)]
    order = one_at_a_time(*late, *others)
    assert 9 <= order.index(1) <= 12


def test_an_idle_client_does_not_accumulate_turns():
    engine = Engine(make_scheduler(max_num_seqs=1))
    engine.add(*(make_submit(i, 8, arrival=0.0, client="a") for i in range(1, 31)))
    engine.add(*(make_submit(i, 8, arrival=0.0, client="b") for i in range(41, 43)))
    for _ in range(60):
        engine.step()
    engine.add(*(make_submit(i, 8, arrival=9.0, client="b") for i in range(51, 61)))
    order = starts(engine)
    first = ["b" if number > 50 else "a" for number in order[:10]]
    assert 4 <= first.count("a") <= 6


def test_the_queue_alternates_between_clients():
    engine = Engine(make_scheduler(max_num_seqs=1))
    engine.add(make_submit(9, 4, arrival=0.0, client="a"))
    engine.step()
    engine.add(*(make_submit(i, 4, arrival=1.0, client="a") for i in (1, 2)))
    engine.add(make_submit(3, 4, arrival=2.0, client="b"))
    assert engine.scheduler.status().queue == (3, 1, 2)


def test_a_client_with_100_long_answers_does_not_delay_another_client():
    crowd = [make_submit(i, 20, max_tokens=1800, arrival=0.0, client="a") for i in range(100)]
    engine = Engine(make_scheduler(10_000, max_num_seqs=16)).add(*crowd)
    for _ in range(50):
        engine.step()
    engine.add(*(make_submit(i, 20, arrival=engine.now, client="b") for i in range(200, 210)))
    for _ in range(3):
        engine.step()
    assert 200 in engine.tokens
    while len([i for i in engine.finished if i >= 200]) < 10:
        engine.step()
    assert engine.now < 2.0
    assert engine.scheduler.missed["preempted"] <= 8
    engine.run(100_000)
    assert {len(tokens) for number, tokens in engine.tokens.items() if number < 100} == {1800}


def test_a_client_with_all_memory_makes_room_for_another_client():
    engine = Engine(make_scheduler(40, max_num_seqs=64))
    engine.add(*(make_submit(i, 60, max_tokens=100, arrival=0.0, client="a") for i in range(9)))
    for _ in range(10):
        engine.step()
    engine.add(make_submit(20, 200, max_tokens=2, arrival=engine.now, client="b"))
    while 20 not in engine.finished:
        engine.step()
    assert not any(number < 9 for number in engine.finished)
    engine.run(100_000)


def test_a_client_is_not_preempted_for_one_that_runs_as_many():
    engine = Engine(make_scheduler(max_num_seqs=4))
    for client in ("a", "b"):
        numbers = range(4) if client == "a" else range(10, 14)
        fields = {"max_tokens": 500, "client": client, "arrival": engine.now}
        engine.add(*(make_submit(i, 4, **fields) for i in numbers))
        for _ in range(100):
            engine.step()
    running = [s.client for s in engine.scheduler._table.running]
    assert sorted(running) == ["a", "a", "b", "b"]
    assert engine.scheduler.status().num_preemptions == 2
