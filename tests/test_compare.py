"""Tests that every test and suite named in the docs exists."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def exists(named: str) -> bool:
    path, _, test = named.partition("::")
    file = ROOT / path
    return file.exists() and (not test or f"def {test}(" in file.read_text())


def test_each_test_and_make_target_named_in_the_docs_exists() -> None:
    concepts = ROOT / "docs" / "concepts"
    said = "".join((concepts / f"{n}.md").read_text() for n in ("promises", "compare", "origins"))
    named = set(re.findall(r"`(tests/[^`]+)`", said))
    assert len(named) >= 30
    assert not [test for test in named if not exists(test)]
    suites = tomllib.loads((ROOT / "tools" / "suites.toml").read_text())["suites"]
    targets = set(re.findall(r"`make ([\w-]+)`", said))
    assert len(targets) >= 3
    assert not targets - suites.keys()


def test_each_decision_has_a_verdict_and_a_test() -> None:
    page = (ROOT / "docs" / "concepts" / "origins.md").read_text()
    lines = page.splitlines()
    rows = [it for it in lines if it.startswith("| ") and "| original project |" not in it]
    decision = r"\| .+ \| \*\*(Taken|Changed|Not taken)\*\*.* \| `tests/[\w/]+\.py::test_\w+` \|"
    assert len(rows) >= 30
    assert not [row for row in rows if not re.fullmatch(decision, row)]
