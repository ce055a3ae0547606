"""Times of decode steps by their rows, of which only some have been seen."""

import pytest

from headrace_engine.scheduler.row_times import RowTimes


def timed(*seen: tuple[int, float], times: int = 3) -> RowTimes:
    """Steps of one chunk, by rows and seconds."""
    rows = RowTimes()
    for num_rows, seconds in seen * times:
        rows.observe(1, num_rows, seconds)
    return rows


def test_nothing_is_known_of_other_numbers_of_chunks() -> None:
    assert timed((1, 0.1)).seconds(1, 1) == pytest.approx(0.1)
    assert timed((1, 0.1)).seconds(2, 2) == RowTimes().seconds(1, 1) == 0


def test_what_lies_between_is_expected_between_and_what_lies_beyond_is_cheap() -> None:
    rows = timed((1, 0.1), (5, 0.2))
    assert rows.seconds(1, 3) == pytest.approx(0.15)
    assert 0.2 < rows.seconds(1, 6) < 0.21


def test_one_slow_step_does_not_condemn_its_number_of_rows() -> None:
    rows = timed((1, 0.1))
    rows.observe(1, 5, 0.5)
    assert rows.seconds(1, 5) < 0.25
    for _ in range(2):
        rows.observe(1, 5, 0.5)
    assert rows.seconds(1, 5) == pytest.approx(0.5)


def test_what_was_not_seen_for_long_is_forgotten() -> None:
    rows = timed((1, 0.1), (5, 0.5))
    for _ in range(1100):
        rows.observe(1, 1, 0.1)
    assert rows.seconds(1, 5) < 0.12
