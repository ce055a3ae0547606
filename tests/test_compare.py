"""The comparison with other servers names tests that are there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_each_test_and_target_that_the_comparison_names_exists() -> None:
    said = (ROOT / "docs" / "compare.md").read_text()
    paths = set(re.findall(r"`(tests/[\w/.]+)`", said))
    assert len(paths) > 5
    assert not [path for path in paths if not (ROOT / path).exists()]
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"`make ([\w-]+)`", said))
    assert not [target for target in targets if f"\n{target}:" not in makefile]
