"""Tests how many replicas a model has, and the sums of their figures."""

from msgspec.structs import replace

from headrace.engines.client import EngineUp
from headrace.fleet.replica import Replica, ReplicaCount, counts_of, ready_of, total
from headrace_common.messages import Status
from tests.fleet.fakes import READY, STATUS, FakeEngine


def replicas(*taken: int) -> list[Replica]:
    """Return replicas that came up at 0, with these numbers of taken places."""
    made = [Replica(number, FakeEngine()) for number in range(len(taken))]
    for it, num_taken in zip(made, taken, strict=True):
        it.came_up(EngineUp(READY), 0.0)
        it.num_taken = num_taken
    return made


def test_another_replica_starts_after_requests_have_waited_for_a_second() -> None:
    count, one = ReplicaCount(1, 2), replicas(2)
    asked = [count.needs_more(now, one, has_queue=True) for now in (5.0, 5.9, 6.0, 6.1)]
    assert asked == [False, False, True, False]  # the last begins to count anew


def test_an_empty_queue_resets_the_waiting_time() -> None:
    count, one = ReplicaCount(1, 2), replicas(2)
    lines = [(0.0, True), (0.5, False), (1.0, True), (1.9, True), (2.0, True)]
    asked = [count.needs_more(now, one, has_queue) for now, has_queue in lines]
    assert asked == [False, False, False, False, True]


def test_no_replica_starts_beyond_the_limit_or_while_another_loads() -> None:
    full, loading = ReplicaCount(1, 1), ReplicaCount(1, 3)
    one = replicas(2)
    two = [*one, Replica(1, FakeEngine())]
    for now in (0.0, 1.0, 2.0):
        assert not full.needs_more(now, one, has_queue=True)
        assert not loading.needs_more(now, two, has_queue=True)


def test_a_missing_replica_starts_at_once_unless_one_was_just_given_up() -> None:
    count = ReplicaCount(2, 2)
    assert count.needs_more(0.0, replicas(0), has_queue=False)
    count.give_up(1.0)
    asked = [count.needs_more(now, replicas(0), has_queue=False) for now in (1.0, 30.9, 31.0)]
    assert asked == [False, False, True]


def test_of_too_many_replicas_a_dead_or_else_the_least_busy_one_is_removed() -> None:
    count, some = ReplicaCount(1, 1), replicas(2, 1, 1)
    assert count.spare(0.0, some) is some[2]
    some[0].up = None
    assert count.spare(0.0, some) is some[0]


def test_replicas_are_removed_one_at_a_time_and_only_while_one_is_up() -> None:
    count, some = ReplicaCount(1, 1), replicas(2, 1, 1)
    some[2].is_leaving = True
    assert count.spare(0.0, some) is None
    down = [Replica(number, FakeEngine()) for number in range(2)]
    assert count.spare(0.0, down) is None


def test_the_newest_idle_replica_is_removed_down_to_the_minimum() -> None:
    count, some = ReplicaCount(1, 3, idle_s=10.0), replicas(0, 1, 0)
    assert count.spare(9.9, some) is None
    assert count.spare(10.0, some) is some[2]
    some[1].num_taken = 0  # it had something to do until now
    assert count.spare(19.9, some[:2]) is some[0]
    assert count.spare(20.0, some[:2]) is some[1]
    assert count.spare(99.0, some[:1]) is None


def test_without_a_limit_idle_replicas_stay() -> None:
    assert ReplicaCount(1, 3).spare(1e9, replicas(0, 0)) is None


def test_capacities_of_replicas_add_up_and_the_shortest_context_applies() -> None:
    other = replace(READY, max_num_seqs=5, max_model_len=128)
    whole = ready_of([READY, other])
    assert whole.max_num_seqs == 7 and whole.layout.num_blocks == 64
    assert whole.max_model_len == 128


def test_figures_of_replicas_are_summed_and_counts_of_dead_ones_are_kept() -> None:
    life = Status(1, 2, 3, 4, 5, 6, missed={"model": 1}, num_preemptions=7)
    both = total((STATUS, counts_of(life)))
    assert (both.num_running, both.num_waiting, both.blocks_free) == (0, 1, 32)
    assert (both.num_steps, both.num_preemptions, both.missed) == (6, 7, {"model": 1})
