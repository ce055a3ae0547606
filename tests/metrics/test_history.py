"""Tests the figures of the last hour with a clock that the test sets."""

import pytest

from headrace.metrics.history import NUM_POINTS, History, hour, live


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_rates_cover_ten_seconds_and_latencies_a_minute(clock: Clock) -> None:
    history = History(clock)
    history.now().wait("ttft", 4.0)
    for _ in range(20):
        clock.now += 1
        history.now().generated += 30
        history.now().computed += 100
        history.now().wait("gap", 0.02)
    history.now().wait("gap", 3.0)
    clock.now += 1
    found = live([history])
    assert (found["tokens_out_per_s"], found["tokens_in_per_s"]) == (30, 100)
    assert found["gap_p50_ms"] == pytest.approx(20, rel=0.03)
    assert found["gap_p99_ms"] == pytest.approx(3000, rel=0.03)
    assert found["ttft_p50_ms"] == pytest.approx(4000, rel=0.03)
    clock.now += 61
    assert set(live([history]).values()) == {0, None}


def test_the_current_second_is_not_counted_until_it_is_over(clock: Clock) -> None:
    history = History(clock)
    history.now().generated += 5
    assert live([history])["tokens_out_per_s"] == 0
    clock.now += 1
    assert live([history])["tokens_out_per_s"] == 5  # it is one second old


def test_the_last_hour_is_kept_in_a_bounded_number_of_points(clock: Clock) -> None:
    history = History(clock)
    for _ in range(2 * 3600):
        history.now().generated += 2
        clock.now += 1
    points = hour([history])
    assert len(points) == NUM_POINTS - 1 or len(points) == NUM_POINTS
    assert [point["ago_s"] for point in points[-2:]] == [20, 10]
    assert {point["tokens_out_per_s"] for point in points} == {2}
    assert len(history._points) <= NUM_POINTS


def test_the_histories_of_several_models_are_merged(clock: Clock) -> None:
    one, other = History(clock), History(clock)
    for history, seconds, number in ((one, 0.1, 9), (other, 2.0, 1)):
        for _ in range(number):
            history.now().wait("queue", seconds)
        history.now().prompt += 100
    one.now().cached += 50
    clock.now += 10
    (point,) = hour([one, other])
    assert point["cached_share"] == 0.25
    assert point["queue_p50_ms"] == pytest.approx(100, rel=0.03)
    assert point["queue_p99_ms"] == pytest.approx(2000, rel=0.03)
    assert point["ttft_p50_ms"] is None
