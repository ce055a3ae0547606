import pytest

from headrace.bench.profile import PROFILES, Calibration, plans

CALIBRATION = Calibration(0.03, {256: 0.5, 1024: 2.0, 4096: 10.0})


@pytest.mark.parametrize(
    ("seconds", "length"), [(0.5, 256), (2.0, 1024), (6.0, 2560), (99.0, 4096), (0.1, 256)]
)
def test_a_length_is_found_between_those_measured(seconds: float, length: int) -> None:
    assert CALIBRATION.length_for(seconds) == length
    assert CALIBRATION.seconds_for(2560) == pytest.approx(6.0)


def test_cells_reach_the_ratios_they_are_named_for() -> None:
    found = plans(PROFILES["ratios"], CALIBRATION, 8192)
    assert len(found) == 12
    plan = next(plan for plan in found if plan.name == "85x0.25")
    alone_s = CALIBRATION.seconds_for(plan.prompt_tokens)
    assert alone_s / CALIBRATION.tpot_s == pytest.approx(85, rel=0.01)
    assert alone_s / plan.interval_s == pytest.approx(0.25)


def test_streams_begin_anew_before_they_fill_the_context() -> None:
    for plan in plans(PROFILES["ratios"], CALIBRATION, 8192):
        filled = plan.per_round * plan.interval_s / CALIBRATION.tpot_s
        assert plan.per_round == 1 or filled <= 8192 - 512


def test_a_fixed_profile_is_one_cell_that_fits_the_model() -> None:
    (plan,) = plans(PROFILES["wall"], CALIBRATION, 8192)
    assert (plan.prompt_tokens, plan.per_round) == (2048, 1)
    assert plans(PROFILES["wall"], CALIBRATION, 512)[0].prompt_tokens == 511
