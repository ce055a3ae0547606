"""Checks the table in tests/trained/README.md against the tests of trained weights."""

import re
from pathlib import Path

from headrace_engine.models.registry import FAMILIES
from headrace_engine.runner.lanes.choose import LANES

TESTS = Path(__file__).parent
TEXT = (TESTS / "trained" / "README.md").read_text()

ROWS = {
    cells[0].strip("` "): [cell.strip() for cell in cells[1:]]
    for cells in (line.strip("|").split("|") for line in TEXT.splitlines() if "| `" in line[:3])
}


def named_in(cell: str) -> list[str]:
    return re.findall(r"`([\w/]+\.py)`", cell)


def test_every_family_and_every_lane_has_its_row() -> None:
    families = {place.partition(":")[0].rpartition(".")[2] for place in FAMILIES.values()}
    assert ROWS.keys() == families | LANES.keys()


def test_the_tests_that_the_table_names_exist() -> None:
    for name, (_, on_trained, on_random) in ROWS.items():
        assert named_in(on_random), name
        for file in named_in(on_trained) + named_in(on_random):
            assert (TESTS / file).is_file(), file


def test_the_forms_and_lanes_that_the_table_names_are_run() -> None:
    fixtures = (TESTS / "trained" / "conftest.py").read_text()  # have the types of the files
    for name, (weights, on_trained, _) in ROWS.items():
        texts = [(TESTS / file).read_text() for file in named_in(on_trained)]
        forms = re.findall(r"b?float\d+|int\d|Q\d\w+", weights)
        assert all(form in fixtures + "".join(texts) for form in forms), name
        assert name not in LANES or not texts or any(f'"{name}"' in text for text in texts), name


def test_the_table_claims_trained_weights_only_if_a_test_runs_them() -> None:
    named = set[str]()
    for name, (weights, on_trained, _) in ROWS.items():
        files = named_in(on_trained)
        assert weights.startswith("none") == (not files), name
        named.update(files)
        assert all(file.startswith("trained/") for file in files), name
        if name not in LANES:  # a family's model is named as the fixtures of its file are
            model = weights.partition("-")[0].partition(" 270M")[0].replace(" ", "").lower()
            uses = [model in (TESTS / file).read_text() for file in files]
            assert all(uses), name
    assert named == {f"trained/{file.name}" for file in (TESTS / "trained").glob("test_*.py")}
