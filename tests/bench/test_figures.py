import msgspec
import pytest

from headrace.bench.figures import cost_of_chunking, figures, gaps, goodput, percentile, spread
from headrace.bench.record import Injection, ServerRun
from tests.bench.builders import make_cell, make_round

STREAM = (0.5, 1.5, 2.5, 3.0, 6.0)


def test_a_gap_that_overlaps_a_window_is_a_stall() -> None:
    tags = [gap.tag for gap in gaps(make_round(STREAM))]
    assert tags == ["steady", "stall", "stall", "stall"]


def test_a_gap_that_only_touches_a_window_is_steady() -> None:
    tags = [gap.tag for gap in gaps(make_round((1.0, 2.0, 4.0, 5.0)))]
    assert tags == ["steady", "stall", "steady"]


def test_a_prompt_without_a_first_token_stalls_until_the_end() -> None:
    tags = [gap.tag for gap in gaps(make_round((0.0, 1.0, 8.0, 9.0), first_token=None))]
    assert tags == ["steady", "stall", "stall"]


def test_gaps_of_a_control_are_the_baseline() -> None:
    assert {gap.tag for gap in gaps(make_round(STREAM, sent=None))} == {"baseline"}


def test_gaps_during_warm_up_prompts_are_not_counted() -> None:
    warm_up = Injection(2.0, 4.0, 100, is_warm_up=True)
    round = msgspec.structs.replace(make_round(STREAM), injections=(warm_up,))
    assert figures(make_cell(round))["gaps_ms"] == {"steady": spread([1.0])}


def test_gaps_before_all_streams_run_and_after_the_end_are_left_out() -> None:
    round = msgspec.structs.replace(make_round((0.0, 2.0, 4.0, 9.0, 12.0)), settled=1.0)
    assert [gap.end for gap in gaps(round)] == [4.0, 9.0]


@pytest.mark.parametrize(("share", "value"), [(0.5, 50), (0.95, 95), (0.99, 99), (1.0, 100)])
def test_a_percentile_is_a_value_that_was_measured(share: float, value: int) -> None:
    assert percentile(range(1, 101), share) == value


def test_a_spread_is_in_milliseconds() -> None:
    one = {"n": 1, "p50": 250.0, "p95": 250.0, "p99": 250.0, "max": 250.0}
    assert (spread([0.25]), spread([])) == (one, {"n": 0})


def test_a_cell_has_its_shares_and_rates() -> None:
    shown = figures(make_cell(make_round(STREAM)))
    assert shown["stalled_share"] == 0.75
    assert shown["ttft_ms"]["p50"] == 2000
    assert shown["prompt_tokens_per_s_in_windows"] == 50
    assert shown["stream_tokens_per_s"] == 1.0


@pytest.mark.parametrize(
    ("limits", "share"), [((2.5, 3.0), 1.0), ((2.5, 2.9), 0.0), ((1.9, 3.0), 0.0)]
)
def test_goodput_counts_prompts_that_keep_both_limits(
    limits: tuple[float, float], share: float
) -> None:
    assert goodput(make_cell(make_round(STREAM)), *limits) == share


def test_the_cost_of_chunking_compares_equal_cells() -> None:
    slow = ServerRun(url="", label="", server={}, cells=[make_cell(make_round(STREAM))])
    fast_round = make_round(STREAM, first_token=3.0)
    fast = ServerRun(url="", label="", server={}, cells=[make_cell(fast_round)])
    (cost,) = cost_of_chunking(slow, fast).values()
    assert cost["ttft"] == 2.0
    assert cost["throughput"] == pytest.approx((50 + 1.5) / (100 + 2))


def test_tokens_that_arrive_at_once_have_no_rate() -> None:
    assert figures(make_cell(make_round((1.0, 1.0, 1.0))))["stream_tokens_per_s"] is None


def test_a_cost_whose_base_is_0_is_none() -> None:
    run = ServerRun(url="", label="", server={}, cells=[make_cell(make_round(STREAM))])
    at_once = make_cell(make_round(STREAM, sent=2.0, first_token=2.0))
    whole = ServerRun(url="", label="", server={}, cells=[at_once])
    (cost,) = cost_of_chunking(run, whole).values()
    assert cost["ttft"] is None
