"""Tests the placement of requests on replicas, including a simulation."""

from array import array

from headrace.fleet.placement import (
    Assignment,
    Placement,
    PlacementRequest,
    PrefixRecord,
    prefix_names,
)
from stress.simulator.placements import Simulation


def placement(num_replicas: int = 2, num_places: int = 2, num_blocks: int = 100) -> Placement:
    made = Placement()
    for replica in range(num_replicas):
        made.open(replica, num_places, num_blocks)
    return made


def want(num_places: int = 1, names: tuple[int, ...] = (), due: float = 0.0) -> PlacementRequest:
    return PlacementRequest(num_places, len(names) + 1, names, due)


def all_moves(made: Placement) -> list[tuple[int, int]]:
    return [(placed.part, placed.replica) for placed in iter(made.next, None)]


def test_each_place_is_assigned_once_and_the_next_request_waits() -> None:
    made = placement()
    for part in range(5):
        made.ask(part, want())
    assert all_moves(made) == [(0, 0), (1, 1), (2, 0), (3, 1)]
    assert made.waiting() == [4]
    made.release(1)
    assert all_moves(made) == [(4, 1)]


def test_a_place_is_only_free_once_its_sequence_is_released() -> None:
    made = placement(num_replicas=1)
    made.ask(0, want(num_places=2))
    made.ask(1, want(num_places=2))
    assert all_moves(made) == [(0, 0)]
    made.release(0)
    assert made.num_taken(0) == 1 and all_moves(made) == []
    made.release(0)
    assert all_moves(made) == [(1, 0)]


def test_a_request_with_more_choices_than_places_takes_a_whole_replica() -> None:
    made = placement(num_replicas=1)
    made.ask(0, want(num_places=5))
    made.ask(1, want())
    assert all_moves(made) == [(0, 0)]
    for _ in range(3):
        made.release(0)
    assert made.num_taken(0) == 2
    made.release(0)
    assert all_moves(made) == [(1, 0)]


def test_a_request_that_fits_does_not_overtake_the_first_in_the_queue() -> None:
    made = placement(num_replicas=1)
    made.ask(0, want())
    assert all_moves(made) == [(0, 0)]
    made.ask(1, want(num_places=2, due=1))
    made.ask(2, want(due=2))
    assert all_moves(made) == []
    made.release(0)
    assert all_moves(made) == [(1, 0)]


def test_requests_of_a_dead_replica_are_placed_before_later_ones() -> None:
    made = placement(num_places=1)
    for part in range(3):
        made.ask(part, want(due=part))
    assert all_moves(made) == [(0, 0), (1, 1)]
    assert made.close(0) == [0] and made.close(0) == []
    made.ask(0, want(due=0))
    made.release(1)
    assert all_moves(made) == [(0, 1)]
    assert made.waiting() == [2]


def test_a_cancelled_request_leaves_the_queue() -> None:
    made = placement(num_replicas=1, num_places=1)
    for part in range(3):
        made.ask(part, want())
    assert all_moves(made) == [(0, 0)]
    assert made.leave(1) and not made.leave(0) and not made.leave(7)
    assert made.waiting() == [2]


def test_a_drained_replica_keeps_its_requests_and_gets_no_more() -> None:
    made = placement()
    made.ask(0, want())
    assert all_moves(made) == [(0, 0)]
    made.drain(0)
    for part in range(1, 4):
        made.ask(part, want())
    assert all_moves(made) == [(1, 1), (2, 1)]
    assert made.num_taken(0) == 1 and made.replica_of(0) == 0


def test_a_long_shared_prefix_decides_the_replica_and_a_short_one_does_not() -> None:
    made = placement(num_places=4)
    made.ask(0, want(names=(1, 2, 3, 4)))
    assert made.next() == Assignment(0, 0, 0)
    made.ask(1, want(names=(1, 2, 3, 4, 5)))
    assert made.next() == Assignment(1, 0, 4)
    made.ask(2, want(names=(1, 7, 8, 9)))
    assert made.next() == Assignment(2, 1, 0)


def test_a_shared_prefix_does_not_outweigh_a_much_busier_replica() -> None:
    made = placement(num_places=4)
    for part in range(5):
        made.ask(part, want(names=(1, 2)))
    assert [replica for _, replica in all_moves(made)] == [0, 0, 0, 1, 1]


def test_a_replica_without_memory_for_the_prompt_is_the_last_choice() -> None:
    made = placement()
    made.set_free_blocks(0, 3)
    made.ask(0, want(names=(1, 2, 3, 4)))
    assert made.next() == Assignment(0, 1, 0)


def test_the_record_of_prefixes_forgets_tails_before_heads() -> None:
    record = PrefixRecord(4)
    record.note((1, 2, 3))
    record.note((1, 7, 8))
    assert record.num_shared((1, 7, 8)) == 3
    assert record.num_shared((1, 2, 3)) == 2


def test_prefix_names_depend_on_the_salt_and_all_previous_tokens() -> None:
    def names(ids: list[int], salt: str = "") -> tuple[int, ...]:
        return prefix_names(array("i", ids).tobytes(), 2, salt)

    assert names([1, 2, 3, 4, 5]) == names([1, 2, 3, 4])
    assert names([1, 2, 9, 9])[0] == names([1, 2, 3, 4])[0]
    assert names([5, 2, 3, 4])[1] != names([1, 2, 3, 4])[1]
    assert not set(names([1, 2, 3, 4], "other")) & set(names([1, 2, 3, 4]))


def test_places_and_order_stay_correct_while_replicas_die() -> None:
    outcome = Simulation(1000, seed=1).run()
    assert outcome.num_placed > 1000 and outcome.num_deaths == 2


def test_prefix_hits_are_nearly_as_frequent_as_with_an_oracle() -> None:
    outcome = Simulation(3000, seed=0, with_deaths=False).run()
    assert 0.6 < outcome.load < 0.8
    assert outcome.num_hit >= 0.9 * outcome.num_oracle
