"""Tests that the history checker finds logs that shrink, change or reach another owner."""

import msgspec
import pytest

from stress.cluster.history import Observation, check, hash_of

LOG = [hash_of({"seq": seq}) for seq in range(10)]
OTHER = hash_of({"seq": "other"})


def seen(began: float, end: int, start: int = 0, is_snapshot: bool = True) -> Observation:
    return Observation("a", began, began + 1, start, tuple(LOG[start:end]), is_snapshot)


def kinds(*observations: Observation) -> list[str]:
    return [violation.kind for violation in check(observations, {"a": LOG})]


def test_growing_prefixes_are_a_valid_history() -> None:
    followed = seen(2.0, 6, 4, is_snapshot=False)
    assert kinds(seen(0.0, 3), seen(1.5, 5), followed, seen(4.0, 10), seen(6.0, 10)) == []


def test_reads_at_the_same_time_may_return_different_prefixes() -> None:
    assert kinds(seen(0.0, 8), seen(0.5, 3)) == []


@pytest.mark.parametrize("is_snapshot", [True, False])
def test_a_snapshot_must_include_all_events_that_a_client_has_received(is_snapshot: bool) -> None:
    assert kinds(seen(0.0, 8, is_snapshot=is_snapshot), seen(2.0, 7)) == ["lost"]


def test_a_following_reader_may_lag_behind() -> None:
    assert kinds(seen(0.0, 8), seen(2.0, 4, 2, is_snapshot=False)) == []


def test_a_stream_that_disappears_counts_as_lost() -> None:
    assert kinds(seen(0.0, 2), seen(2.0, 0)) == ["lost"]


def test_an_event_that_differs_from_the_final_log_counts_as_changed() -> None:
    wrong = msgspec.structs.replace(seen(0.0, 3), hashes=(LOG[0], OTHER, LOG[2]))
    assert kinds(wrong) == ["changed"]


def test_events_after_the_final_end_count_as_lost() -> None:
    longer = msgspec.structs.replace(seen(0.0, 10), hashes=(*LOG, OTHER))
    assert kinds(longer) == ["lost"]


def test_a_read_by_another_owner_is_a_violation() -> None:
    assert kinds(msgspec.structs.replace(seen(0.0, 3), is_foreign=True)) == ["wrong failure"]


def test_events_are_equal_by_their_contents() -> None:
    assert hash_of({"a": 1, "b": 2}) == hash_of({"b": 2, "a": 1}) != hash_of({"a": 1, "b": 3})
