"""The pauses before an engine is started again."""

from headrace.engines.backoff import Backoff


def test_pauses_grow_with_deaths_in_a_row_and_begin_again_after_a_long_life() -> None:
    backoff = Backoff()
    assert [backoff.after(1) for _ in range(3)] == [0.0, 0.5, 1.0]
    assert backoff.after(61) == 0.0
    assert [backoff.after(1) for _ in range(20)][-1] == 30.0
