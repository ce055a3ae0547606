import msgspec

from headrace.bench.validity import drifted, reasons
from tests.bench.builders import EVIDENCE, make_cell, make_round

ROUND = make_round((0.5, 1.5, 2.5, 3.0, 6.0))


def replaced(thing, **changes):
    return msgspec.structs.replace(thing, **changes)


def test_a_cell_is_valid_if_prompts_were_computed_while_all_streams_ran() -> None:
    assert reasons(make_cell(ROUND)) == ()
    assert reasons(make_cell(ROUND, evidence=None)) == ()


def test_a_cell_without_a_mixed_step_is_invalid() -> None:
    cell = make_cell(ROUND, evidence=replaced(EVIDENCE, num_mixed=0))
    assert reasons(cell) == ("no step processed prompt tokens together with all 1 streams",)


def test_a_cell_whose_prompt_never_ran_with_the_streams_is_invalid() -> None:
    cell = make_cell(replaced(ROUND, injections=make_round(first_token=None).injections))
    assert reasons(cell) == ("1 of 1 prompts had no first token while the streams ran",)


def test_a_stream_that_ends_too_early_makes_its_cell_invalid() -> None:
    lost = replaced(ROUND, lost_at=3.0)
    assert reasons(make_cell(lost)) == ("a stream ended while it was needed",)
    assert reasons(make_cell(lost, plan=None)) == ("a stream ended while it was needed",)


def test_an_engine_restart_makes_its_cell_invalid() -> None:
    cell = make_cell(ROUND, evidence=replaced(EVIDENCE, num_starts=1))
    assert reasons(cell) == ("the engine restarted",)


def test_a_machine_that_changes_its_speed_is_detected() -> None:
    cell = make_cell(ROUND)
    assert drifted([cell, cell], 1.25) is None
    cell.prompt_s = (1.0, 1.3)
    found = drifted([make_cell(ROUND), cell], 1.25)
    assert found is not None and "took 1.00 s to 1.30 s" in found
