"""The pages that say what checks the promises name tests and suites that exist."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_each_test_and_target_that_the_pages_name_exists() -> None:
    concepts = ROOT / "docs" / "concepts"
    said = (concepts / "promises.md").read_text() + (concepts / "compare.md").read_text()
    paths = set(re.findall(r"`(tests/[\w/.]+)`", said))
    assert len(paths) >= 3
    assert not [path for path in paths if not (ROOT / path).exists()]
    suites = tomllib.loads((ROOT / "tools" / "suites.toml").read_text())["suites"]
    targets = set(re.findall(r"`make ([\w-]+)`", said))
    assert len(targets) >= 3
    assert not targets - suites.keys()
