"""Tests the pauses before an engine is restarted."""

from headrace.engines.backoff import Backoff


def test_pauses_grow_with_consecutive_deaths_and_reset_after_a_long_run() -> None:
    backoff = Backoff()
    assert [backoff.after(1) for _ in range(3)] == [0.0, 0.5, 1.0]
    assert backoff.after(61) == 0.0
    assert [backoff.after(1) for _ in range(20)][-1] == 30.0
