"""Tests that the simulated system finds faults planted in the server."""

import pytest

from headrace.fleet.served_model import ServedModel
from stress.simulated_server.planted import (
    ALL,
    SeedResult,
    form_of,
    look_for,
    run_seed,
    seeds_of,
    sound_seeds,
    summary_of,
)
from stress.simulated_server.planting import Edit, Fault, Planted, Stale
from stress.simulated_server.run import read_model

FOUND_SOON = (
    "the_end_of_a_log_wakes_nobody",
    "the_end_precedes_the_last_token",
    "a_reader_resumes_one_event_too_late",
    "ended_sequences_keep_their_owner",
    "the_sweep_cannot_be_cancelled",
)
BUDGET_S = 60.0


@pytest.fixture(scope="module")
def model() -> ServedModel:
    return read_model()


@pytest.mark.parametrize("name", ALL)
def test_a_fault_fits_the_code(name: str) -> None:
    Planted(ALL[name])


@pytest.mark.parametrize(
    "edit",
    [
        Edit("headrace.streams.log:Tail.extend", "if self._sleeping:", "pass"),
        Edit("headrace.streams.log:Tail.grow", "if self._waiting:", "pass"),
        Edit("headrace.streams.logs:Tail.extend", "if self._waiting:", "pass"),
        Edit("headrace.batches.redis_store:_CLAIM", "return 2", "return 1"),
    ],
)
def test_a_fault_whose_code_is_gone_is_an_error(edit: Edit) -> None:
    with pytest.raises(Stale):
        Planted(Fault("any", "", (edit,)))


@pytest.fixture(scope="module")
def sound(model: ServedModel) -> dict[int, SeedResult]:
    return sound_seeds(range(8), model)[0]


@pytest.mark.parametrize("name", FOUND_SOON)
def test_a_planted_fault_is_found(
    name: str, sound: dict[int, SeedResult], model: ServedModel
) -> None:
    reports = (look_for(ALL[name], [it], (), model, BUDGET_S) for it in seeds_of(name, sound))
    assert any(report.failure for report in reports)


def test_counting_visits_changes_nothing(sound: dict[int, SeedResult], model: ServedModel) -> None:
    nothing = Fault("none", "", ())
    seed = min(sound)
    assert run_seed(seed, nothing, model).digest == sound[seed].digest


def test_the_summary_is_the_last_line_of_the_traceback() -> None:
    assert summary_of("Traceback\n  x\nAssertionError: too slow\n") == "AssertionError: too slow"


def test_violations_that_differ_only_in_numbers_are_equal() -> None:
    first = form_of("AssertionError: key-3: no byte for 15 s")
    assert first == form_of("AssertionError: key-12: no byte for 9 s")
