"""Tests that the tour quotes the current code and the source table is complete."""

from pathlib import Path

from tools.make_tour import PAGE, WAY_IN, WAY_OUT, page

DOCS = Path(__file__).parent.parent / "docs"


def test_the_tour_has_fifteen_stops() -> None:
    assert len(WAY_IN) + len(WAY_OUT) == 15


def test_the_tour_quotes_the_code_as_it_is_now() -> None:
    assert PAGE.read_text() == page(), "run: python -m tools.make_tour"


def test_the_table_of_the_source_tree_has_every_package() -> None:
    src = DOCS.parent / "src"
    found = {path.parent.name for path in src.rglob("*.py") if len(path.relative_to(src).parts) < 4}
    table = (DOCS / "concepts" / "architecture.md").read_text()
    missing = {name for name in found if f"`{name}`" not in table and f"{name}/" not in table}
    assert not missing
