"""Tests the cost model with synthetic steps that are noisy, change speed or are all alike."""

from random import Random

import pytest

from headrace_engine.scheduler.cost import Coefficients, CostModel, LeastSquares, StepShape
from tests.scheduler.builders import shape_of

TRUTH = Coefficients(c_decode=0.021, c_prompt=0.024, g=5e-6, b=1.9e-3, a=4.5e-7)


def random_step(rng: Random) -> StepShape:
    decoders = [rng.randrange(64, 4096) for _ in range(rng.randrange(0, 6))]
    prompts = [(rng.choice([0, 0, 512, 2048]), rng.randrange(8, 256))]
    return shape_of(decoders, prompts if rng.random() < 0.5 or not decoders else [])


def truth(shape: StepShape, speed: float = 1.0) -> float:
    return TRUTH.seconds(shape, shape.num_prompt_tokens > 0) / speed


def feed(model: CostModel, rng: Random, number: int, speed: float = 1.0) -> None:
    for _ in range(number):
        shape = random_step(rng)
        noise = rng.gauss(1, 0.05) * (10 if rng.random() < 0.02 else 1)
        model.observe(shape, truth(shape, speed) * noise)


def errors(model: CostModel, rng: Random, speed: float = 1.0) -> list[float]:
    shapes = [random_step(rng) for _ in range(200)]
    return sorted(abs(model.predict(s) / truth(s, speed) - 1) for s in shapes)


@pytest.mark.parametrize("seed", range(8))
def test_the_model_is_within_5_percent_after_50_noisy_steps(seed):
    rng, model = Random(seed), CostModel()
    feed(model, rng, 50)
    assert errors(model, rng)[100] < 0.05


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("speed", [0.2, 0.5, 2.5, 5.0])
def test_the_model_follows_a_change_of_speed_within_100_steps(seed, speed):
    rng, model = Random(seed), CostModel()
    feed(model, rng, 200)
    feed(model, rng, 100, speed)
    assert errors(model, rng, speed)[100] < 0.10


def test_10_000_decode_steps_do_not_change_predictions_of_prompts():
    rng, model = Random(0), CostModel()
    feed(model, rng, 200)
    for _ in range(10_000):
        shape = shape_of([rng.randrange(64, 4096) for _ in range(rng.randrange(1, 5))], [])
        model.observe(shape, truth(shape) * rng.gauss(1, 0.05))
    chunk = shape_of([128] * 4, [(512, 128)])
    assert model.predict(chunk) == pytest.approx(truth(chunk), rel=0.10)


def test_predictions_grow_with_context_and_length():
    rng, model = Random(3), CostModel()
    feed(model, rng, 100)
    fit = model.coefficients
    assert min(fit.c_decode, fit.c_prompt, fit.g, fit.b, fit.a) >= 0
    by_context = [fit.cost(context, 64) for context in (0, 100, 1000, 10_000)]
    by_length = [fit.cost(100, new) for new in (1, 10, 100, 1000)]
    assert by_context == sorted(by_context) and by_length == sorted(by_length)


def test_the_first_prompt_steps_are_not_treated_as_outliers():
    model = CostModel()
    for context in range(100, 2100, 10):
        model.observe(shape_of([context], []), 0.021 + context * 1e-6)
    for new in [16, 32, 64, 128, 16, 32, 64, 128]:
        model.observe(shape_of([100], [(0, new)]), 0.02 + new * 0.002)
    assert model.is_measured
    assert model.predict(shape_of([100], [(0, 100)])) == pytest.approx(0.22, rel=0.1)


def test_outliers_are_ignored():
    rng, model = Random(5), CostModel()
    feed(model, rng, 100)
    shape = shape_of([200] * 4, [])
    before = model.predict(shape)
    for _ in range(6):
        model.observe(shape, 50.0)
    assert model.predict(shape) == pytest.approx(before, rel=0.02)


def test_the_margin_is_the_95th_percentile_of_late_steps_within_bounds():
    rng, model = Random(6), CostModel()
    assert model.margin(True) == 1.0
    feed(model, rng, 300)
    assert 1.03 < model.margin(True) < 1.2
    model._ratios[True].extend([9.0] * 64)
    assert model.margin(True) == 2.0
    model._ratios[True].extend([0.1] * 64)
    assert model.margin(True) == 1.0


def test_eight_prompt_steps_of_three_sizes_are_enough_to_measure():
    model = CostModel()
    for number, new in enumerate([10, 10, 20, 20, 10, 20, 10, 20, 10, 40]):
        assert not model.is_measured, number
        model.observe(shape_of([], [(0, new)]), 0.1)
    assert model.is_measured and model.largest_measured == 40


def test_a_step_that_took_no_time_is_ignored():
    model = CostModel()
    model.observe(shape_of([1], []), 0.0)
    assert model.coefficients == Coefficients()


@pytest.mark.parametrize("context", [0, 100, 10_000])
@pytest.mark.parametrize("room", [0.001, 0.02, 0.5])
def test_the_largest_chunk_is_the_longest_one_that_fits(context, room):
    largest = TRUTH.largest_chunk(context, room)
    assert TRUTH.cost(context, largest) <= room or largest == 0
    assert TRUTH.cost(context, largest + 1) > room


def test_a_chunk_of_any_size_fits_if_tokens_cost_nothing():
    assert Coefficients().largest_chunk(5, 0.1) is None
    assert Coefficients(b=0.01).largest_chunk(5, 0.1) == 10
    assert Coefficients(g=1.0).largest_chunk(5, 0.1) == 0


def test_least_squares_recovers_the_coefficients_of_its_rows():
    rng, fit, made = Random(1), LeastSquares(3), [3.0, 0.5, 0.0]
    for _ in range(30):
        row = [1.0, rng.random() * 10, rng.random()]
        fit.add(row, sum(c * x for c, x in zip(made, row, strict=True)), 1.0)
    assert fit.solve() == pytest.approx(made, abs=1e-6)


def test_least_squares_returns_zero_instead_of_a_negative_coefficient():
    fit = LeastSquares(2)
    for x in range(1, 10):
        fit.add([1.0, float(x)], 10.0 - x, 1.0)
    intercept, slope = fit.solve()
    assert slope == 0.0 and intercept == pytest.approx(5.0)


def test_removed_rows_do_not_affect_the_solution():
    fit = LeastSquares(1)
    fit.add([1.0], 2.0, 1.0)
    fit.add([1.0], 100.0, 1.0)
    fit.add([1.0], 100.0, -1.0)
    assert fit.solve() == pytest.approx([2.0])
    assert LeastSquares(2).solve() == [0.0, 0.0]


@pytest.mark.parametrize("with_prompt", [False, True])
def test_a_slow_period_is_expected_to_continue_and_forgotten_when_it_ends(with_prompt):
    rng, model = Random(7), CostModel()
    feed(model, rng, 100)
    shape = shape_of([200] * 4, [(300, 20)] if with_prompt else [])
    usual = model.predict(shape)
    for _ in range(5):
        model.observe(shape, 1.4 * usual)
    assert model.predict(shape) > 1.25 * usual
    for _ in range(5):
        model.observe(shape, usual)
    assert model.predict(shape) < 1.1 * usual


def test_faster_decode_steps_do_not_make_prompts_look_cheap():
    rng, model = Random(3), CostModel()
    feed(model, rng, 200)
    alone, chunk = shape_of([128] * 4, []), shape_of([128] * 4, [(512, 128)])
    for _ in range(20):
        model.observe(alone, 0.75 * truth(alone))
    assert model.predict(alone) == pytest.approx(0.75 * truth(alone), rel=0.1)
    assert model.predict(chunk) == pytest.approx(truth(chunk), rel=0.1)


def test_a_slow_period_does_not_change_later_predictions():
    rng, model = Random(8), CostModel()
    feed(model, rng, 200)
    shape = shape_of([200] * 4, [(300, 20)])
    usual = model.predict(shape)
    for _ in range(40):
        model.observe(shape, 2 * usual)
    feed(model, rng, 30)
    assert model.predict(shape) == pytest.approx(usual, rel=0.15)


def test_the_optimistic_prediction_falls_until_the_work_is_timed_again():
    rng, model = Random(9), CostModel()
    feed(model, rng, 100)
    shape = shape_of([200] * 4, [])
    usual = model.predict(shape)
    for _ in range(100):
        model.forget()
    assert model.predict(shape) == usual
    assert 0.6 * usual < model.hope(shape) < 0.8 * usual
    # One step is enough: the machine has become twice as fast.
    model.observe(shape, usual / 2)
    assert model.hope(shape) == model.predict(shape) == pytest.approx(usual / 2, rel=0.1)
    for _ in range(5000):
        model.forget()
    assert 0 < model.hope(shape) < 0.2 * usual
