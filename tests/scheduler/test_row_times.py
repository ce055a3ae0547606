"""Tests the times of decode steps by number of rows, of which only some were measured."""

import pytest

from headrace_engine.scheduler.row_times import RowTimes


def timed(*seen: tuple[int, float], times: int = 3) -> RowTimes:
    """Return the row times after steps of one chunk with these rows and seconds."""
    rows = RowTimes()
    for num_rows, seconds in seen * times:
        rows.observe(1, num_rows, seconds)
    return rows


def test_times_are_separate_for_each_number_of_chunks() -> None:
    assert timed((1, 0.1)).seconds(1, 1) == pytest.approx(0.1)
    assert timed((1, 0.1)).seconds(2, 2) == RowTimes().seconds(1, 1) == 0


def test_times_are_interpolated_and_extrapolated_optimistically() -> None:
    rows = timed((1, 0.1), (5, 0.2))
    assert rows.seconds(1, 3) == pytest.approx(0.15)
    assert 0.2 < rows.seconds(1, 6) < 0.21


def test_one_slow_step_hardly_changes_the_estimate() -> None:
    rows = timed((1, 0.1))
    rows.observe(1, 5, 0.5)
    assert rows.seconds(1, 5) < 0.25
    for _ in range(2):
        rows.observe(1, 5, 0.5)
    assert rows.seconds(1, 5) == pytest.approx(0.5)


def test_old_times_are_forgotten() -> None:
    rows = timed((1, 0.1), (5, 0.5))
    for _ in range(1100):
        rows.observe(1, 1, 0.1)
    assert rows.seconds(1, 5) < 0.12
